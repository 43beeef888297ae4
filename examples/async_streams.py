"""Follow several streams at once. The engine runs in a process of its own; leaving a loop ends that request there."""

import asyncio

from rapid_llm import AsyncLLM, SamplingParams


async def follow(llm: AsyncLLM, prompt: str, params: SamplingParams) -> str:
    text = prompt
    async for output in llm.generate(prompt, params):
        text += output.outputs[0].delta
    return text


async def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    async with AsyncLLM(max_model_len=512) as llm:
        prompts = ["1, 2, 3, 4,", "Once upon a time", "The capital of France is"]
        for text in await asyncio.gather(*(follow(llm, prompt, params) for prompt in prompts)):
            print(repr(text))
        async for output in llm.chat([{"role": "user", "content": "Tell me a story."}], SamplingParams(temperature=0.0)):
            print(output.outputs[0].delta, end="", flush=True)
            if len(output.outputs[0].token_ids) >= 16:
                break
        print()


asyncio.run(main())

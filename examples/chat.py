"""Ask the embedded model one question. Any folder in Hugging Face layout or .gguf file goes in place of nothing: LLM("path")."""

from rapid_llm import LLM, SamplingParams

llm = LLM()
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
[output] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32))
print(output.outputs[0].text)

"""Stream one continuation, then run several prompts in one batch, each with values of its own."""

from rapid_llm import LLM, SamplingParams

llm = LLM(max_model_len=512)

for output in llm.stream("Once upon a time", SamplingParams(temperature=0.0, max_tokens=16)):
    print(output.outputs[0].delta, end="", flush=True)
print()

prompts = ["1, 2, 3, 4,", "A, B, C, D,"]
params = [SamplingParams(temperature=0.0, max_tokens=8), SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=8)]
for output in llm.generate(prompts, params):
    print(repr(output.prompt), "->", repr(output.outputs[0].text), output.outputs[0].finish_reason)

"""How many tokens a request took."""

from collections.abc import Sequence

import msgspec

from rapid_llm.engine.output import RequestOutput


class PromptTokensDetails(msgspec.Struct):
    """Tokens of the prompt that the prefix cache held."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """A prompt counts once, whatever ``n`` is; an end-of-text token does not count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> "Usage":
        """Of one output a prompt."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        said = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        return cls(prompt, said, prompt + said, PromptTokensDetails(cached))

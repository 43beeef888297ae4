"""Every knob a user may set, and resolve(), which leaves no "auto" and no None. Torch-free."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rapid_llm.errors import ConfigError, RequestError

PAGE_SIZE = 16
"""Pool rows a page holds: the unit of KV allocation."""

GPU_STEP_MS = 15.0
"""``max_step_ms`` of a GPU: a stream that stays fluent to read, and chunks that still fill the device."""
DTYPES = ("float32", "bfloat16", "float16")
MAX_LOGPROBS = 20
MAX_ANSWERS = 128
"""Most answers to one prompt."""
LOGPROBS_MODES = ("raw", "processed")
"""What ``SamplingParams.logprobs_mode`` may name."""
PROMPT_LOGIT_ROWS = 128
"""Prompt tokens of one step whose logits are kept for ``prompt_logprobs``: what bounds their memory."""
QUANTIZE = ("fp8", "int8", "int4", "nvfp4")
"""What ``EngineConfig.quantize`` may name."""
KV_DTYPES = ("fp8_e4m3",)
"""What ``EngineConfig.kv_dtype`` may name."""
GRAMMARS = ("json_schema", "json_object", "regex", "lark")
"""What ``Grammar.kind`` may name."""
MAX_GRAMMAR_CHARS = 100_000
GGUF = ("keep", "dequantise")
"""What ``EngineConfig.gguf`` may name."""


@dataclass(frozen=True)
class EngineConfig:
    """What a user asks of an engine; None means "choose for me".

    Attributes:
        model: a folder in Hugging Face layout, a .gguf file, or a model of the Hugging Face hub by name, "org/name" or
            "org/name:file.gguf", from its cache or by download; None is the embedded SmolLM2-135M-Instruct.
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        dtype: "float32", "bfloat16" or "float16"; None is float32 on a CPU and bfloat16 on a GPU.
        max_model_len: longest prompt plus answer, in tokens; None is the model's own context.
        max_num_seqs: sequences that run at once; never more than ``max_batched_tokens``, since each takes part in every step.
        max_batched_tokens: tokens of one step, prefill chunks and decodes together.
        max_kv_tokens: rows of the KV pool, rounded up to pages; None sizes it from ``memory_fraction``. It may be smaller
            than the context: only a request that cannot fit is refused.
        prefix_cache: keep K and V of what was computed for as long as there is room, for requests that begin alike.
        max_step_ms: milliseconds that a step may take in which some sequences decode and others prefill, or three times what the
            decodes take alone where that is more: how long a stream waits for its next token while a prompt is computed.
            Prefill chunks are cut to what is expected to fit, with a margin for what expectations were wrong by of late. None is
            15 on a GPU and no bound on a CPU, where one token may take longer; math.inf is no bound.
        quantize: keep linear layers as one of QUANTIZE, their weights rounded while they are loaded; None keeps the numbers.
        kv_dtype: "fp8_e4m3" keeps K and V in a byte an element, with a scale a layer and KV head that the checkpoint gives, or
            that is measured on a short text at the start (docs/quantization.md); None keeps them in ``dtype``.
        gguf: "keep" holds the linear layers of a GGUF file in the bits they have, where a product reads them (Q4_0, Q4_1, Q8_0,
            Q4_K), "dequantise" makes numbers of them; None keeps them on a GPU whose native kernels read them, and makes numbers
            of them elsewhere, a CPU for one, which multiplies numbers faster.
        cuda_graphs: replay steps as CUDA graphs, which saves the host its launches; off launches each kernel of each step.
        deterministic: the same bits for a request alone and in any batch, however its prompt is cut into steps, whether it was
            preempted, and with the prefix cache and without; at a cost (docs/sampling.md).
        memory_fraction: share of the free device memory that the KV pool may take when ``max_kv_tokens`` is None.
        revision: branch, tag or full commit hash of a model that is named; None is "main".
        offline: never download, as HF_HUB_OFFLINE=1 says too.
    """

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    max_kv_tokens: int | None = None
    memory_fraction: float | None = None
    cuda_graphs: bool = True
    prefix_cache: bool = True
    deterministic: bool = False
    max_step_ms: float | None = None
    quantize: str | None = None
    kv_dtype: str | None = None
    gguf: str | None = None
    revision: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        for name in ("model", "device"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} is of the wrong type", got=repr(value), wanted="a string", change="quote it")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(
                "dtype is not supported", got=repr(self.dtype), wanted=" | ".join(DTYPES), change="pass one of those"
            )
        if self.quantize is not None and self.quantize not in QUANTIZE:
            wanted = " | ".join(QUANTIZE)
            raise ConfigError("quantize is not supported", got=repr(self.quantize), wanted=wanted, change="pass one of those")
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            wanted = " | ".join(KV_DTYPES)
            change = "pass one of those, or leave it out for the dtype of activations"
            raise ConfigError("kv_dtype is not supported", got=repr(self.kv_dtype), wanted=wanted, change=change)
        if self.gguf is not None and self.gguf not in GGUF:
            raise ConfigError("gguf is not supported", got=repr(self.gguf), wanted=" | ".join(GGUF), change="pass one of those")
        if self.gguf == "keep" and self.quantize is not None:
            got, change = f"quantize {self.quantize!r}", "leave one of the two out"
            raise ConfigError("gguf='keep' and another format contradict each other", got=got, change=change)
        if self.device is not None and self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ConfigError("device is not supported", got=repr(self.device), wanted="cpu | cuda", change="pass one of those")
        for name in ("max_model_len", "max_num_seqs", "max_batched_tokens", "max_kv_tokens"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise ConfigError(f"{name} is out of range", got=repr(value), wanted="an integer >= 1", change="raise it")
        if self.memory_fraction is not None and not (_is_number(self.memory_fraction) and 0 < self.memory_fraction <= 1):
            got = repr(self.memory_fraction)
            raise ConfigError(
                "memory_fraction is out of range", got=got, wanted="0 < value <= 1", change="pass a share of memory"
            )
        if self.max_step_ms is not None and not (_is_number(self.max_step_ms) and self.max_step_ms > 0):
            got, wanted = repr(self.max_step_ms), "milliseconds > 0"
            raise ConfigError("max_step_ms is out of range", got=got, wanted=wanted, change="raise it, or pass inf for no bound")
        for name in ("cuda_graphs", "prefix_cache", "deterministic", "offline"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is out of range", got=repr(value), wanted="True or False", change="pass one of those")
        if self.revision is not None and not (isinstance(self.revision, str) and self.revision):
            wanted = "a branch, a tag or a full commit hash"
            raise ConfigError("revision cannot be used", got=repr(self.revision), wanted=wanted, change="pass one of those")
        if self.revision is not None and self.model is None:
            wanted = "a model of the hub, as org/name"
            raise ConfigError("revision has no effect without a model", got=self.revision, wanted=wanted, change="name the model")

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "EngineConfig":
        """Build one from keywords; an unknown keyword is a ConfigError that names the nearest known one."""
        refuse_unknown(options, (field.name for field in fields(cls)), "engine setting")
        return cls(**options)

    @classmethod
    def from_file(cls, path: str | Path, **options: Any) -> "EngineConfig":
        """Build one from a config file in TOML (docs/config.md); ``options`` win over it. LLM(**vars(config)) serves it.

        Raises: ConfigError on a file that cannot be read and on a key that is no setting, with the nearest one.
        """
        from rapid_llm.config_file import engine_settings, read_config_file, settle

        return settle(cls, engine_settings(read_config_file(path)), options, str(path), "engine setting").config


def refuse_unknown(options: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise ConfigError for the first of ``options`` that is not ``known``, naming the nearest known one."""
    known = sorted(known)
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            change = f"did you mean {near[0]}?" if near else "remove it"
            raise ConfigError(f"unknown {what} {name!r}", wanted="one of " + ", ".join(known), change=change.rstrip("?"))


@dataclass(frozen=True)
class ResolvedConfig:
    """An EngineConfig in which every choice is made. Sizes in tokens; the pool holds ``num_pages * PAGE_SIZE`` rows.

    ``max_step_ms`` is math.inf where steps may take any time.
    """

    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    num_pages: int
    prefix_cache: bool = True
    max_step_ms: float = math.inf
    cuda_graphs: bool = True
    deterministic: bool = False

    @property
    def max_kv_tokens(self) -> int:
        """Rows of the KV pool."""
        return self.num_pages * PAGE_SIZE

    @property
    def pages_per_sequence(self) -> int:
        """Width of the page table: pages of the longest sequence."""
        return pages_for(self.max_model_len)


def pages_for(num_tokens: int) -> int:
    """Pages that hold ``num_tokens`` rows."""
    return -(-num_tokens // PAGE_SIZE)


def mixed_sizes(most: int) -> list[int]:
    """Tokens that a GPU pads steps with a prefill chunk to, up to ``most``."""
    sizes = [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, *range(2048, most + 1024, 1024)]
    return [*(size for size in sizes if size < most), most]


def resolve(
    config: EngineConfig,
    *,
    context: int,
    kv_bytes_per_token: int,
    free_bytes: int,
    is_cpu: bool,
    sliding_window: int | None = None,
) -> ResolvedConfig:
    """Make every choice of ``config`` that needs the model and the device.

    Args:
        config: the user's wishes.
        context: longest sequence the model was made for, in tokens.
        kv_bytes_per_token: bytes that one token's K and V take over all layers.
        free_bytes: memory that is free on the device once weights are loaded.
        is_cpu: whether the device is the host itself, which keeps most of its memory for others.
        sliding_window: tokens that some layer looks back at most; None where none is bounded.

    Raises:
        ConfigError: a context past the model's or past a sliding window, or no room for a single page.
    """
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        wanted = f"at most {context}, which the model was made for"
        raise ConfigError("max_model_len is too long", got=str(max_model_len), wanted=wanted, change="lower it")
    if sliding_window is not None and max_model_len > sliding_window:
        raise ConfigError(
            f"sliding_window {sliding_window} is shorter than the context, and attention over a window is not supported",
            got=f"max_model_len {max_model_len}",
            wanted=f"at most {sliding_window}, where the window has no effect",
            change=f"set max_model_len to {sliding_window}",
        )
    if config.max_kv_tokens is not None:
        num_pages = pages_for(config.max_kv_tokens)
        if num_pages * PAGE_SIZE * kv_bytes_per_token > free_bytes:
            got = f"{config.max_kv_tokens} tokens ({num_pages * PAGE_SIZE * kv_bytes_per_token / 1e9:.2f} GB)"
            raise ConfigError(
                "the KV pool does not fit", got=got, wanted=f"at most {free_bytes / 1e9:.2f} GB", change="lower max_kv_tokens"
            )
    else:
        share = config.memory_fraction or (0.25 if is_cpu else 0.9)
        affordable = int(free_bytes * share) // (kv_bytes_per_token * PAGE_SIZE)
        # On a host more than a few contexts is memory that nobody asked for: the pool is touched page by page, but counted whole.
        useful = pages_for(max_model_len) * (min(4, config.max_num_seqs) if is_cpu else config.max_num_seqs)
        num_pages = min(affordable, useful)
    if num_pages < 1:
        got = f"{free_bytes / 1e6:.0f} MB free for the KV pool"
        wanted = f"{PAGE_SIZE * kv_bytes_per_token / 1e6:.1f} MB for one page"
        raise ConfigError("no room for the KV pool", got=got, wanted=wanted, change="free memory or raise memory_fraction")
    step_ms = config.max_step_ms or (math.inf if is_cpu else GPU_STEP_MS)
    sizes = (max_model_len, config.max_num_seqs, config.max_batched_tokens, num_pages)
    return ResolvedConfig(*sizes, config.prefix_cache, step_ms, config.cuda_graphs, config.deterministic)


@dataclass(frozen=True)
class Grammar:
    """What the text of an answer may be (docs/structured-output.md).

    Attributes:
        kind: "json_schema", "json_object" (any object), "regex" or "lark" (llguidance's dialect of it).
        source: the schema as JSON, the expression or the grammar; empty for "json_object". At most 100,000 characters.
    """

    kind: str
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            wanted = " | ".join(GRAMMARS)
            raise _bad_grammar("the kind is not supported", got=f"{self.kind!r:.80}", wanted=wanted, change="pass one of those")
        if not isinstance(self.source, str) or bool(self.source) == (self.kind == "json_object"):
            wanted = "no source" if self.kind == "json_object" else f"the {self.kind} as a string"
            raise _bad_grammar("the source cannot be used", got=f"{self.source!r:.80}", wanted=wanted, change="pass that")
        if len(self.source) > MAX_GRAMMAR_CHARS:
            got, wanted = f"{len(self.source):,} characters", f"at most {MAX_GRAMMAR_CHARS:,}"
            raise _bad_grammar(f"the {self.kind} is too long", got=got, wanted=wanted, change="make it simpler")
        if self.kind == "json_schema":
            _check_json(self.source)


@dataclass(frozen=True)
class SamplingParams:
    """How the answer to one request is drawn and where it ends. The defaults are plain sampling to the end of the context.

    Logits are changed in this order: repetition, frequency and presence penalties, ``logit_bias``, bans (``bad_words``,
    ``min_tokens``, ``grammar``), temperature, top_k, top_p, min_p. A request whose every token is banned ends with an error of
    its own.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the shortest most-likely prefix that holds this mass, in (0, 1]; 1 is off.
        top_k: keep the k most likely tokens; 0, -1 or anything from the vocabulary's size up is off. Applied before top_p.
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1]; 0 is off.
        seed: noise is a function of (seed, position) alone, so a seed gives the same text in any batch; None draws one.
        n: answers to the one prompt, 1 to 128. The first is the answer that n = 1 gives; the others' seeds derive from its seed.
        max_tokens: most new tokens; None is the rest of the context.
        min_tokens: until so many new tokens are there, tokens that would end the answer are banned, and no stop string counts
            that begins in their text.
        stop: a string or several; the answer ends before the first that appears. Matched on text, across tokens.
        stop_token_ids: ids that end the answer, beside the model's own end-of-text ids.
        ignore_eos: go on past the model's end-of-text ids (not past ``stop`` and ``stop_token_ids``).
        presence_penalty: taken from the logit of every token that the answer holds, -2 to 2; 0 is off.
        frequency_penalty: the same for each time that the answer holds it, -2 to 2; 0 is off.
        repetition_penalty: of every token in prompt or answer, a logit above 0 is divided by it and any other multiplied by it,
            0.01 to 100; 1 is off.
        logit_bias: token id to a number that is added to its logit, -100 to 100; -100 bans the token.
        bad_words: a string or several that the answer may not come to hold. Each is turned into tokens, as it is and behind a
            space; where all tokens of one but the last have just been said, the last is banned. Other spellings of the same
            text in tokens are not seen.
        logprobs: None, or how many of the likeliest tokens to report for each step beside the chosen one (0 to 20). The
            values are natural logs of probabilities.
        logprobs_mode: whose probabilities ``logprobs`` reports. "raw" is the model's own distribution, before everything above.
            "processed" is the one that the token was drawn from, after everything above; tokens that it rules out are not
            listed, and at temperature 0 it holds the chosen token alone.
        prompt_logprobs: None, or how many of the likeliest tokens to report for each token of the prompt beside that token
            itself (0 to 20), always of the model's own distribution.
        grammar: what the text may be; None is anything. Tokens that it does not allow are banned, special ones among them. Where
            it may end, the end of text is allowed; where it must, the answer ends.
        skip_special_tokens: leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: str | tuple[str, ...] | list[str] | None = None
    logprobs: int | None = None
    logprobs_mode: str = "raw"
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf, "a finite number >= 0")
        _check_number("top_p", self.top_p, 0.0, 1.0, "0 < top_p <= 1", open_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 <= min_p <= 1")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number from -2 to 2")
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number from -2 to 2")
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "a number from 0.01 to 100")
        _check_int("top_k", self.top_k, -1, None, "an integer >= -1 (0 and -1 are off)")
        _check_int("seed", self.seed, -(2**63), 2**63 - 1, "a 64-bit integer or None", optional=True)
        _check_int("n", self.n, 1, MAX_ANSWERS, f"an integer from 1 to {MAX_ANSWERS}")
        _check_int("max_tokens", self.max_tokens, 1, None, "an integer >= 1 or None", optional=True)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, f"an integer from 0 to {self.max_tokens or 'the context'}")
        for name in ("logprobs", "prompt_logprobs"):
            _check_int(name, getattr(self, name), 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS} or None", optional=True)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), "True or False")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise _refused("logprobs_mode", self.logprobs_mode, " | ".join(LOGPROBS_MODES))
        if self.logprobs_mode != "raw" and self.logprobs is None:
            wanted, change = "a number of logprobs with it", "set logprobs, or leave logprobs_mode out"
            got, param = self.logprobs_mode, "logprobs_mode"
            raise RequestError("logprobs_mode has no effect alone", param=param, got=got, wanted=wanted, change=change)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise _refused("grammar", self.grammar, "a Grammar or None")
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        object.__setattr__(self, "stop_token_ids", _id_tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def bad_strings(self) -> tuple[str, ...]:
        """``bad_words`` as a tuple."""
        return self.bad_words if isinstance(self.bad_words, tuple) else ()

    def with_defaults(self, **values: Any) -> "SamplingParams":
        """A copy in which each given value that is not None replaces this one's."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})


POOLINGS = ("last", "mean")


@dataclass(frozen=True)
class PoolingParams:
    """How a prompt becomes a vector. The defaults are those of decoders that were trained for it.

    Attributes:
        pooling: what of the hidden states behind the model's last norm: "last" is the last token's, which has seen all others, as
            Qwen3-Embedding and its like are trained; "mean" is the mean over all tokens.
        normalize: scale the vector to length 1, so that a dot product is the cosine.
        dimensions: None, or how many leading numbers to keep, 1 to the model's hidden size; scaled to length 1 after that. Of use
            where a model is trained so that its leading numbers say most (Matryoshka representation learning).
    """

    pooling: str = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise _refused("pooling", self.pooling, " | ".join(POOLINGS))
        if not isinstance(self.normalize, bool):
            raise _refused("normalize", self.normalize, "True or False")
        _check_int("dimensions", self.dimensions, 1, None, "an integer >= 1 or None", optional=True)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _refused(name: str, value: Any, wanted: str) -> RequestError:
    change = f"pass another {name}"
    return RequestError(f"{name} is out of range", param=name, got=repr(value), wanted=wanted, change=change)


def _check_number(name: str, value: Any, low: float, high: float, wanted: str, *, open_low: bool = False) -> None:
    if not _is_number(value) or math.isinf(value) or not low <= value <= high or (open_low and value == low):
        raise _refused(name, value, wanted)


def _check_int(name: str, value: Any, low: int, high: int | None, wanted: str, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not _is_int(value) or value < low or (high is not None and value > high):
        raise _refused(name, value, wanted)


def _bad_grammar(problem: str, **parts: str) -> RequestError:
    return RequestError(f"grammar: {problem}", param="grammar", **parts)


def _check_json(schema: str) -> None:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        got, wanted = str(error) or "nesting without an end", "a JSON object"
        raise _bad_grammar("the json_schema is no JSON", got=got, wanted=wanted, change="correct it") from error
    if not isinstance(parsed, dict | bool):
        got, wanted = type(parsed).__name__, "a JSON object"
        raise _bad_grammar("the json_schema cannot be used", got=got, wanted=wanted, change="pass a schema")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    texts = (
        ()
        if value is None
        else (value,)
        if isinstance(value, str)
        else tuple(value)
        if isinstance(value, tuple | list)
        else (None,)
    )
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _refused(name, value, "a non-empty string or a list of them")
    return texts


def _biases(biases: Any) -> dict[int, float]:
    wanted = "a dict from token ids >= 0 to numbers from -100 to 100"
    if not isinstance(biases, Mapping | None):
        raise _refused("logit_bias", biases, wanted)
    for token, bias in (biases or {}).items():
        if not _is_int(token) or token < 0:
            raise _refused("logit_bias", token, wanted)
        _check_number("logit_bias", bias, -100.0, 100.0, wanted)
    return dict(biases or {})


def _id_tuple(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, tuple | list) or not all(_is_int(token) and token >= 0 for token in ids):
        raise _refused("stop_token_ids", ids, "a list of token ids >= 0")
    return tuple(ids)

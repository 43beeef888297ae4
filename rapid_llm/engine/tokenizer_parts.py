"""What a tokenizer is made of, read from a Hugging Face folder or from GGUF metadata."""

import logging
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rapid_llm.checkpoint.json_file import read_json_object
from rapid_llm.checkpoint.source import TokenizerFolder, TokenizerMetadata
from rapid_llm.errors import CheckpointError
from rapid_llm.models.config import read_token_ids

logger = logging.getLogger(__name__)

_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
_GGUF_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))  # of text, of turn, of message


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer taken apart.

    Attributes:
        backend: the library's tokenizer.
        where: the file or folder it came from, for errors.
        bos_id, eos_ids: begin-of-text and end-of-text ids that the tokenizer itself names.
        adds_bos, adds_eos: whether they go around a plain prompt; None leaves it to the backend's post-processor.
        chat_template: Jinja source.
    """

    backend: Backend
    where: Path
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool | None
    adds_eos: bool | None
    chat_template: str | None


def parts_of(source: TokenizerFolder | TokenizerMetadata) -> TokenizerParts:
    """Read the parts.

    Raises:
        CheckpointError: a file or key that is missing, broken, or of a kind that is not supported, by name.
    """
    return _from_folder(source) if isinstance(source, TokenizerFolder) else _from_metadata(source)


def _from_folder(source: TokenizerFolder) -> TokenizerParts:
    file = source.folder / "tokenizer.json"
    backend = _load_backend(file)
    config = _optional_object(source.folder / "tokenizer_config.json")
    names = _optional_object(source.folder / "special_tokens_map.json") | config
    bos_id = _named_token(names, "bos_token", backend, file)
    if bos_id is None and source.bos_token_id is not None and backend.id_to_token(source.bos_token_id) is not None:
        bos_id = source.bos_token_id
    eos_id = _named_token(names, "eos_token", backend, file)
    return TokenizerParts(
        backend=backend,
        where=file,
        bos_id=bos_id,
        eos_ids=() if eos_id is None else (eos_id,),
        adds_bos=_flag(config, "add_bos_token", file),
        adds_eos=_flag(config, "add_eos_token", file),
        chat_template=_folder_template(source.folder, config),
    )


def _load_backend(file: Path) -> Backend:
    if not file.is_file():
        problem = f"{file.parent} has no tokenizer.json"
        change = "write one: transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        raise CheckpointError(problem, wanted="the tokenizers library's format", change=change)
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception, whatever is wrong with the file
        raise CheckpointError(f"{file} cannot be used", got=str(error), wanted="a tokenizer", change="fetch it again") from error
    backend.no_truncation()  # some files were saved with the settings of a training run
    backend.no_padding()
    return backend


def _optional_object(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}


def _named_token(names: Mapping[str, Any], key: str, backend: Backend, file: Path) -> int | None:
    """The id of the token that ``key`` names, as a string or as an object with "content"."""
    value = names.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    token_id = backend.token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        wanted = f"a token of {file.name}"
        raise CheckpointError(f"{file.parent}: {key} is no token", got=repr(value)[:120], wanted=wanted, change=f"correct {key}")
    return token_id


def _flag(raw: Mapping[str, Any], key: str, file: Path) -> bool | None:
    value = raw.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise CheckpointError(f"{file}: key {key!r} cannot be used", got=repr(value), wanted="true or false", change="correct it")


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own wins over the key, which holds one or several by name."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is no text", got=error.reason, wanted="UTF-8", change="fetch it again") from error
    value = config.get("chat_template", _optional_object(folder / "chat_template.json").get("chat_template"))
    if value is None or isinstance(value, str):
        return value
    return _default_template(value, folder / "tokenizer_config.json")


def _default_template(value: Any, file: Path) -> str | None:
    is_list = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    named = {entry.get("name"): entry.get("template") for entry in value} if is_list else {}
    if not named or not all(isinstance(text, str) for text in (*named, *named.values())):
        wanted = "a string or a list of {name, template}"
        raise CheckpointError(
            f"{file}: key 'chat_template' cannot be used", got=repr(value)[:120], wanted=wanted, change="correct it"
        )
    if "default" not in named and len(named) > 1:
        logger.warning("%s: several chat templates (%s) and none is named 'default': none is used", file, ", ".join(named))
        return None
    return str(named.get("default", next(iter(named.values()))))


def _from_metadata(source: TokenizerMetadata) -> TokenizerParts:
    metadata, file = source.metadata, source.file
    backend = _gguf_backend(metadata, file)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise _metadata_refused(file, "tokenizer.chat_template", type(template).__name__, "a string")
    return TokenizerParts(
        backend=backend,
        where=file,
        bos_id=next(iter(read_token_ids(metadata, "tokenizer.ggml.bos_token_id", file)), None),
        eos_ids=tuple({token: None for key in _GGUF_END_KEYS for token in read_token_ids(metadata, key, file)}),
        adds_bos=bool(_flag(metadata, "tokenizer.ggml.add_bos_token", file)),
        adds_eos=bool(_flag(metadata, "tokenizer.ggml.add_eos_token", file)),
        chat_template=template,
    )


def _gguf_backend(metadata: Mapping[str, Any], file: Path) -> Backend:
    """Byte-level BPE straight from the arrays."""
    tokens, merges = _texts(metadata, "tokenizer.ggml.tokens", file), _texts(metadata, "tokenizer.ggml.merges", file)
    pre_tokenizer = _gguf_pre_tokenizer(metadata, file)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        got = f"{len(tokens) - len(vocab)} tokens twice"
        raise _metadata_refused(file, "tokenizer.ggml.tokens", got, "each token once")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        backend = Backend(models.BPE(vocab=vocab, merges=pairs))  # type: ignore[arg-type]  # pairs are checked by the library
    except Exception as error:  # the library raises bare Exception for merges that do not fit
        raise _metadata_refused(file, "tokenizer.ggml.merges", str(error)[:120], "pairs of tokens") from error
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    _add_marked_tokens(backend, tokens, metadata, file)
    return backend


def _gguf_pre_tokenizer(metadata: Mapping[str, Any], file: Path) -> pre_tokenizers.PreTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise _metadata_refused(file, "tokenizer.ggml.model", repr(model), "'gpt2' (byte-level BPE)")
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        return words
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    raise _metadata_refused(file, "tokenizer.ggml.pre", repr(pre), "'smollm' | 'gpt-2'")


def _add_marked_tokens(backend: Backend, tokens: list[str], metadata: Mapping[str, Any], file: Path) -> None:
    """Tell the backend which tokens are found whole in a text: control tokens (special) and those that users defined."""
    key = "tokenizer.ggml.token_type"
    kinds = metadata.get(key)
    if kinds is None:
        return
    if not isinstance(kinds, array) or len(kinds) != len(tokens):
        raise _metadata_refused(file, key, type(kinds).__name__, f"{len(tokens):,} numbers")
    by_kind = dict(enumerate(kinds))
    special = [tokens[place] for place, kind in by_kind.items() if kind == _GGUF_CONTROL]
    added = [tokens[place] for place, kind in by_kind.items() if kind == _GGUF_USER_DEFINED]
    if "" in special + added:
        raise _metadata_refused(file, "tokenizer.ggml.tokens", "an empty control token", "texts")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])


def _texts(metadata: Mapping[str, Any], key: str, file: Path) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise _metadata_refused(file, key, "no such key" if value is None else type(value).__name__, "an array of strings")
    return value


def _metadata_refused(file: Path, key: str, got: str, wanted: str) -> CheckpointError:
    return CheckpointError(f"{file}: key {key!r} is not supported", got=got, wanted=wanted, change="use another model")

"""A tokenizer from a folder in Hugging Face layout."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from rapid_llm.checkpoint.json_file import read_json_object
from rapid_llm.checkpoint.source import TokenizerFolder
from rapid_llm.engine.tokenizer_parts import TokenizerParts, read_flag
from rapid_llm.errors import CheckpointError

logger = logging.getLogger(__name__)


def folder_parts(source: TokenizerFolder) -> TokenizerParts:
    """Read the parts from tokenizer.json and the files beside it.

    Raises:
        CheckpointError: a file or key that is missing or broken, by name.
    """
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
        adds_bos=read_flag(config, "add_bos_token", file),
        adds_eos=read_flag(config, "add_eos_token", file),
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

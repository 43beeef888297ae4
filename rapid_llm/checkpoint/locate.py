"""From what a user names to where it lies on this disk."""

from collections.abc import Callable
from pathlib import Path

from rapid_llm.checkpoint.embedded import find_embedded_model
from rapid_llm.checkpoint.hub import find_model
from rapid_llm.config import EngineConfig
from rapid_llm.ledger import StartupLedger


def locate(
    config: EngineConfig, ledger: StartupLedger | None = None, progress: Callable[[int, int, float], None] | None = None
) -> Path:
    """Where the model of ``config`` lies on this disk. A download runs here, in the caller's thread, so that Ctrl-C ends it.

    Raises: CheckpointError when it is nowhere, or cannot be downloaded.
    """
    ledger = StartupLedger() if ledger is None else ledger
    with ledger.phase("find model"):
        model = config.model
        found = find_embedded_model() if model is None else find_model(model, config.revision, offline=config.offline)
    if not isinstance(found, Path):
        with ledger.phase("download"):
            from rapid_llm.checkpoint.hub_download import download

            found = download(found, progress)
    if model is not None and found != Path(model):
        ledger.note(f"{model}: {found}")
    return found

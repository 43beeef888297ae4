"""Config in, wired engine out. The one file that knows every layer: the machine at a glance."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rapid_llm.checkpoint.gguf import GgufCheckpoint
from rapid_llm.checkpoint.source import CheckpointSource
from rapid_llm.config import PAGE_SIZE, EngineConfig, ResolvedConfig, resolve
from rapid_llm.engine.engine import Engine
from rapid_llm.engine.grammar import Grammars, model_vocabulary
from rapid_llm.engine.tokenizer import Tokenizer
from rapid_llm.errors import CheckpointError, ConfigError
from rapid_llm.kernels.device import DeviceInfo, current_device
from rapid_llm.kernels.dispatcher.dispatch import choose, fallback_summary, verified_elsewhere_summary
from rapid_llm.kernels.dispatcher.explain import served_kernels
from rapid_llm.kernels.jit.compiler_hash import keep_compiler_hash
from rapid_llm.kernels.provenance import keep_source_hashes
from rapid_llm.ledger import StartupLedger
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.registry import architecture
from rapid_llm.modules.placement import Placement
from rapid_llm.quantization.checkpoint import checkpoint_formats
from rapid_llm.quantization.formats import Formats
from rapid_llm.quantization.gguf import GROUP, OPS, GgufFormats
from rapid_llm.quantization.online import OnlineFormats
from rapid_llm.runtime.calibration_text import CALIBRATION_TEXT
from rapid_llm.runtime.kv_calibration import measured_scales
from rapid_llm.runtime.kv_pool import KVPool, check_bound
from rapid_llm.runtime.kv_scales import KVScales, given_scales, unit_scales
from rapid_llm.runtime.memory_budget import MemoryBudget
from rapid_llm.runtime.quantised_cache import KeptFormats, QuantisedCache, load_quantised
from rapid_llm.runtime.recorded_steps import Model
from rapid_llm.runtime.weight_loader import load_weights
from rapid_llm.runtime.worker import Worker
from rapid_llm.weights import Layer

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, float], None]
"""Called while weights load with bytes done, bytes in all, seconds so far."""


def build_engine(
    config: EngineConfig,
    source: CheckpointSource,
    ledger: StartupLedger,
    progress: Progress | None = None,
    compiled: Callable[[], None] = lambda: None,
    tokenizer: Tokenizer | None = None,
) -> Engine:
    """Wire model, pool, worker, scheduler, and what follows grammars.

    Args:
        config, source: what to build, and its weights.
        ledger: where its phases are noted.
        progress: told how far the weights are.
        compiled: returns when the kernels that this engine launches are in Triton's cache, where others compile them.
        tokenizer: the model's, where the caller has it already.

    Raises:
        ConfigError: a setting that this model or device cannot honour.
        CheckpointError: tensors that are not the architecture's.
        NoKernelError: an op that nothing serves here.
    """
    with ledger.phase("device"):
        place = choose_placement(config, source, current_device(config.device))
        if place.device.type == "cuda":
            torch.cuda.synchronize()  # makes the context
    grammars = Grammars(partial(model_vocabulary, source, tokenizer))
    if config.quantize is not None:
        place = replace(place, formats=KeptFormats(place.formats))
    model = source.config
    budget = MemoryBudget(place.device) if place.device.type == "cuda" else None
    with ledger.phase("model"):
        tied_head = is_head_tied(source)
        network = build_network(config, source, place)
        distinct = None if place.info.type == "cpu" else network.of_distinct_layers()
    _load(config, source, network, place.formats, ledger, progress)
    if model.tie_word_embeddings and not tied_head:
        with ledger.phase("head"):
            if torch.equal(network.head.weight, network.embedding.weight):
                network.head.share(network.embedding)
    if budget is not None:
        budget.note("weights")
    scales = choose_scales(config, source, network, place, ledger, tokenizer)
    with ledger.phase("KV pool"):
        resolved = resolve_sizes(config, model, place)
        pool = build_pool(resolved, model, place, scales)
        kept = f" of {config.kv_dtype}" if scales is not None else ""
        ledger.note(f"KV pool of {resolved.max_kv_tokens:,} tokens{kept}, {pool.nbytes / 1e6:,.0f} MB when full")
    if budget is not None:
        budget.note("KV pool")
    with ledger.phase("engine"):
        worker = Worker(resolved, place, network, pool, model.vocab_size)
    compiled()
    if place.info.type != "cpu":
        with ledger.phase("hash of the compiler"):
            keep_compiler_hash()
    with ledger.phase("kernels and graphs"):
        worker.prepare(distinct)
    if budget is not None:
        budget.note("workspace and graphs")
        ledger.note(budget.to_text())
    if place.info.type != "cpu":
        with ledger.phase("evidence"):
            for line in (verified_elsewhere_summary(place.info), fallback_summary(place.questions)):
                if line:
                    logger.warning(line)
    keep_source_hashes()
    return Engine(resolved, worker, grammars, partial(served_kernels, place.questions))


def launch_everything(config: EngineConfig, source: CheckpointSource, info: DeviceInfo) -> None:
    """Make each launch that an engine on ``info`` can make, on tensors that have shapes and no memory; for ``rehearse``."""
    place = replace(choose_placement(config, source, info), device=torch.device("meta"))
    network = build_network(config, source, place)
    any_size = replace(config, cuda_graphs=False, max_kv_tokens=None)  # a kernel is the same for a pool of any size
    sizes = resolve_sizes(any_size, source.config, place, free_bytes=1 << 40)
    pool = build_pool(sizes, source.config, place, None if place.kv_dtype is None else unit_scales(source.config))
    Worker(sizes, place, network, pool, source.config.vocab_size).prepare(network.of_distinct_layers())


def build_network(config: EngineConfig, source: CheckpointSource, place: Placement) -> Any:
    """The model's layers, their weights yet to be filled."""
    positions = config.max_model_len or source.config.context
    network = architecture(source.config.architecture).load()
    return network(place, source.config, max_positions=positions, tied_head=is_head_tied(source))


def _load(
    config: EngineConfig,
    source: CheckpointSource,
    network: Layer,
    formats: Formats,
    ledger: StartupLedger,
    progress: Progress | None,
) -> None:
    """Fill the model: from the checkpoint, or with weights that an earlier start has quantised and kept."""
    if config.quantize is None or not isinstance(formats, KeptFormats):
        with ledger.phase("weights"):
            ledger.note(str(load_weights(source, network.weights(), progress)))
        return
    with ledger.phase("find quantised weights"):
        kept = QuantisedCache(source, config.quantize)
    if kept.is_there:
        with ledger.phase("weights"):
            report = load_quantised(source, network.weights, formats, kept, progress)
        if report is not None:
            ledger.note(str(report))
            ledger.note(f"weights quantised to {config.quantize} by an earlier start, from {kept.folder}")
            return
    with ledger.phase(f"weights, quantised to {config.quantize}"):
        ledger.note(str(load_weights(source, network.weights(), progress)))
    with ledger.phase("keep quantised weights"):
        ledger.note(kept.write(formats.parts))


def choose_placement(config: EngineConfig, source: CheckpointSource, info: DeviceInfo) -> Placement:
    """What ``info`` says, in float32 on a CPU and bfloat16 on a GPU. Weights as choose_formats says."""
    dtype = config.dtype or ("float32" if info.type == "cpu" else "bfloat16")
    formats = choose_formats(config, source, info, dtype)
    device = torch.device(config.device or info.type)
    kv_dtype = None if config.kv_dtype is None else torch.float8_e4m3fn
    return Placement(info, device, getattr(torch, dtype), formats, kv_dtype=kv_dtype, deterministic=config.deterministic)


def choose_formats(config: EngineConfig, source: CheckpointSource, info: DeviceInfo, dtype: str) -> Formats:
    """How the linear layers are kept: as asked for, else as the file has them.

    Raises:
        ConfigError: weights to be rounded that the file holds rounded; a setting that has no effect on such a file.
        CheckpointError: a quantisation that is not served.
    """
    is_gguf, quantised = isinstance(source, GgufCheckpoint), source.config.quantization
    if config.gguf is not None and not is_gguf:
        wanted, change = "a .gguf file", "leave gguf out"
        raise ConfigError("gguf has no effect on this checkpoint", got=str(source.path), wanted=wanted, change=change)
    if config.quantize is not None and quantised is not None:
        got, wanted = f"quantize={config.quantize!r}, quant_method {quantised.get('quant_method')!r}", "one of the two"
        raise ConfigError(f"{source.path} is quantised already", got=got, wanted=wanted, change="leave quantize out")
    if config.quantize is not None:
        return OnlineFormats(config.quantize)
    if is_gguf and config.gguf != "dequantise":
        types = {name: tensor.dtype for name, tensor in source.tensors.items()}
        return GgufFormats(types, OPS.values() if config.gguf == "keep" else _native_products(info, dtype))
    return checkpoint_formats(quantised, source.tensors, source.path)


def _native_products(info: DeviceInfo, dtype: str) -> list[str]:
    """The products of kept GGUF blocks that a device has more for than plain torch."""
    sizes = {"n": 4096, "k": 4096, "group": GROUP}
    return [op for op in OPS.values() if not choose(op, device=info, dtype=dtype, **sizes).fallback]


def is_head_tied(source: CheckpointSource) -> bool:
    """Whether the head is the embedding: the file decides, whatever the config wishes.

    Raises:
        CheckpointError: no head in the file of a model whose config says it has one of its own.
    """
    has_head = "lm_head.weight" in source.tensors
    if not has_head and not source.config.tie_word_embeddings:
        change = "set tie_word_embeddings to true if the embedding is meant to be the head, else load a complete checkpoint"
        got, wanted = "tie_word_embeddings false and no such tensor", "the head's own matrix"
        raise CheckpointError(f"{source.path}: lm_head.weight is missing", got=got, wanted=wanted, change=change)
    return not has_head


def choose_scales(
    config: EngineConfig,
    source: CheckpointSource,
    network: Model,
    place: Placement,
    ledger: StartupLedger,
    tokenizer: Tokenizer | None,
) -> KVScales | None:
    """Scales of a pool of e4m3: the checkpoint's, else measured on a text; None where the pool is kept in the compute dtype.

    Raises: CheckpointError and ConfigError as given_scales and measured_scales do.
    """
    if config.kv_dtype is None:
        if source.kv_scales():
            logger.warning(f"{source.path} has scales of a KV cache in few bits; only kv_dtype='fp8_e4m3' keeps one")
        return None
    with ledger.phase("KV scales"):
        scales = given_scales(source)
        if scales is None:
            longest = config.max_model_len or source.config.context
            ids = (tokenizer or Tokenizer.from_checkpoint(source)).encode(CALIBRATION_TEXT)[:longest]
            scales = measured_scales(network, place, source.config, ids)
            if place.device.type == "cuda":
                torch.cuda.empty_cache()  # what the text took is room for the pool
        ledger.note(f"KV cache in {config.kv_dtype}: {scales.origin}")
    return scales


def resolve_sizes(config: EngineConfig, model: ModelConfig, place: Placement, *, free_bytes: int | None = None) -> ResolvedConfig:
    """Settle every size, once the weights are in memory; ``free_bytes`` are the device's where nobody says how many."""
    row_bytes = 2 * model.num_kv_heads * model.head_dim * (place.kv_dtype or place.dtype).itemsize
    is_cpu = place.device.type == "cpu"
    if free_bytes is None:
        free_bytes = free_host_bytes() if is_cpu else torch.cuda.mem_get_info(place.device)[0]
    return resolve(
        config,
        context=model.context,
        sliding_window=model.sliding_window,
        kv_bytes_per_token=model.num_layers * row_bytes,
        free_bytes=free_bytes,
        is_cpu=is_cpu,
    )


def build_pool(resolved: ResolvedConfig, model: ModelConfig, place: Placement, scales: KVScales | None = None) -> KVPool:
    """Allocate the pool, once its kernels are known to address all of it. ``scales`` are of one in e4m3."""
    kind = "" if place.kv_dtype is None else "_fp8"
    kv = {"num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    attention = kv | {"num_heads": model.num_heads, "page_size": PAGE_SIZE}
    addressed_by = (("update_kv_buffer", kv), ("flashattention2_nopad", attention), ("flash_decoding", attention))
    readers = [choose(op + kind, device=place.info, dtype=place.dtype_name, **sizes) for op, sizes in addressed_by]
    check_bound(resolved.max_kv_tokens, 2 * model.num_kv_heads * model.head_dim, readers)
    shape = (model.num_layers, resolved.num_pages, model.num_kv_heads, model.head_dim)
    return KVPool(shape, place.kv_dtype or place.dtype, place.device, scales)


def free_host_bytes() -> int:
    """Memory that programs may still take on this host, in bytes."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

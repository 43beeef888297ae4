"""Writes the layers of a tiny model in every checkpoint format, value by value. Owes nothing to the package.

A writer takes a layer's float weight [n, k] and gives the tensors of its format by what follows the layer's name, and the values
[n, k] in float64 that they stand for.
"""

import json

import torch
from safetensors.torch import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes, bits, order=None):
    """Codes [r, c] -> int32 [r, c * bits / 32], code ``order[i]`` of each word in its i-th bits from the lowest."""
    per_word = 32 // bits
    codes = codes.to(torch.int64).view(codes.shape[0], -1, per_word)
    total = torch.zeros(codes.shape[:2], dtype=torch.int64)
    for place, which in enumerate(order or range(per_word)):
        total |= codes[:, :, which] << bits * place
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def rounded(weight, group, bits, *, symmetric, dtype=torch.float32):
    """Scales [n, groups] in ``dtype``, zero codes [n, groups] and codes [n, k] of a weight, by groups of its rows."""
    parts = weight.double().view(weight.shape[0], -1, group or weight.shape[1])
    most = 2**bits - 1
    if symmetric:
        scales = (parts.abs().amax(2) * 2 / most).to(dtype).double()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / most).to(dtype).double()
        zeros = (-low / scales).round().clamp(0, most)
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return scales, zeros, codes.view(weight.shape)


def values_of(scales, zeros, codes, columns=None):
    """(code - zero) * scale, each column in the group that ``columns`` [k] names."""
    if columns is None:
        columns = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return (codes - zeros[:, columns]) * scales[:, columns]


def gptq(weight, group=32, bits=4, *, symmetric=False, v2=False, order=None, zero_codes=None):
    """``order`` [k]: under act-order, the columns as they were quantised; ``zero_codes`` [n, groups] takes the place of zeros."""
    k = weight.shape[1]
    order = torch.arange(k) if order is None else order
    scales, zeros, sorted_codes = rounded(weight[:, order], group, bits, symmetric=symmetric, dtype=torch.float16)
    if zero_codes is not None:
        zeros = zero_codes.double()
    codes, columns = torch.empty_like(sorted_codes), torch.empty(k, dtype=torch.int64)
    codes[:, order], columns[order] = sorted_codes, torch.arange(k) // (group or k)
    stored = zeros if v2 else (zeros - 1) % 2**bits
    tensors = {
        "qweight": words(codes, bits).t(),
        "qzeros": words(stored.t(), bits),
        "scales": scales.t().to(torch.float16),
        "g_idx": columns.to(torch.int32),
    }
    return tensors, values_of(scales, zeros, codes, columns)


def awq(weight, group=32, *, zero_codes=None):
    scales, zeros, codes = rounded(weight, group, 4, symmetric=False, dtype=torch.float16)
    if zero_codes is not None:
        zeros = zero_codes.double()
    tensors = {
        "qweight": words(codes.t(), 4, AWQ_ORDER),
        "qzeros": words(zeros.t(), 4, AWQ_ORDER),
        "scales": scales.t().to(torch.float16),
    }
    return tensors, values_of(scales, zeros, codes)


def packed_integers(weight, group=32, bits=4, *, symmetric=True, order=None, dtype=torch.bfloat16):
    """pack-quantized of compressed-tensors; ``order`` as of gptq, group 0 is a scale a row."""
    n, k = weight.shape
    order = torch.arange(k) if order is None else order
    scales, zeros, sorted_codes = rounded(weight[:, order], group, bits, symmetric=symmetric, dtype=dtype)
    codes, columns = torch.empty_like(sorted_codes), torch.empty(k, dtype=torch.int64)
    codes[:, order], columns[order] = sorted_codes, torch.arange(k) // (group or k)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.to(dtype),
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        padded = torch.nn.functional.pad(zeros, (0, 0, 0, -n % (32 // bits)))
        tensors["weight_zero_point"] = words(padded.t(), bits).t()
    if not torch.equal(order, torch.arange(k)):
        tensors["weight_g_idx"] = columns.to(torch.int32)
    return tensors, values_of(scales, zeros, codes, columns)


def integers(weight, *, by_tensor=False, input_scale=None):
    """int-quantized of compressed-tensors."""
    scales = (weight.abs().amax() if by_tensor else weight.abs().amax(1, keepdim=True)).float() / 127
    codes = (weight / scales).round().to(torch.int8)
    tensors = {"weight": codes, "weight_scale": scales.view(1) if by_tensor else scales}
    return with_input_scale(tensors, input_scale), codes.double() * scales.double()


def floats(weight, layout, *, names=("weight_scale", "input_scale"), dtype=torch.float32, input_scale=None, shape=(1,)):
    """e4m3 by "tensor", "channel" or "block"; scales of ``dtype`` under the first of ``names``."""
    n, k = weight.shape
    if layout == "block":
        padded = torch.nn.functional.pad(weight, (0, -k % 128, 0, -n % 128)).view(-(-n // 128), 128, -(-k // 128), 128)
        scales = (padded.abs().amax((1, 3)) / 448).to(dtype)
        wide = scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    else:
        scales = ((weight.abs().amax() if layout == "tensor" else weight.abs().amax(1, keepdim=True)) / 448).to(dtype)
        wide = scales.double()
        scales = scales.view(shape) if layout == "tensor" else scales
    codes = (weight.double() / wide).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return with_input_scale({"weight": codes, names[0]: scales}, input_scale, names[1]), codes.float().double() * wide


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=torch.float64)


def nearest_codes(values):
    """The e2m1 code nearest to each of float64 [n, k]."""
    return (values[..., None] - E2M1).abs().argmin(-1)


def bytes_of(codes):
    """Two codes a byte, the even one in the low half."""
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def nvfp4(weight, *, packed=False, input_scale=None):
    """As ModelOpt writes it, or with ``packed`` compressed-tensors."""
    groups = weight.double().view(len(weight), -1, 16)
    whole = (groups.abs().amax() / (6 * 448)).float()
    scales = (groups.abs().amax(2) / 6 / whole.double()).float().to(torch.float8_e4m3fn)
    divisor = (1 / whole).float()
    steps = scales.float().double() * (1 / divisor.double() if packed else whole.double())
    codes = nearest_codes(groups / steps.clamp(min=1e-30)[..., None]).view(weight.shape)
    values = E2M1[codes] * steps.repeat_interleave(16, 1)
    if packed:
        tensors = {"weight_packed": bytes_of(codes), "weight_scale": scales, "weight_global_scale": divisor.view(1)}
        return with_input_scale(tensors, input_scale, "input_global_scale"), values
    tensors = {"weight": bytes_of(codes), "weight_scale": scales, "weight_scale_2": whole.view(())}
    return with_input_scale(tensors, input_scale), values


def mxfp4(weight, *, packed=False):
    """As gpt-oss has it, whose names follow the layer's without a dot; or with ``packed`` compressed-tensors."""
    groups = weight.double().view(len(weight), -1, 32)
    exponents = (groups.abs().amax(2).log2().floor() - 2).clamp(-127, 127)
    steps = 2.0**exponents
    codes = nearest_codes(groups / steps[..., None]).view(weight.shape)
    values, scales = E2M1[codes] * steps.repeat_interleave(32, 1), (exponents + 127).to(torch.uint8)
    if packed:
        return {"weight_packed": bytes_of(codes), "weight_scale": scales}, values
    return {"_blocks": bytes_of(codes).view(len(weight), -1, 16), "_scales": scales}, values


def with_input_scale(tensors, scale, name="input_scale"):
    return tensors if scale is None else tensors | {name: torch.tensor([scale])}


def parameters_of(oracle):
    """The parameters by the names that folders give them; a stack of experts as its matrices, which are views of it."""
    is_mixtral = oracle.config.model_type == "mixtral"
    block, *parts = ("block_sparse_moe", "w1", "w3", "w2") if is_mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
    for name, parameter in oracle.named_parameters():
        layer, _, stack = name.partition(".mlp.experts.")
        if not stack:
            yield name.replace(".mlp.gate.", f".{block}.gate."), parameter
            continue
        for number, matrix in enumerate(parameter.detach()):
            matrices = zip(parts[:2], matrix.chunk(2), strict=True) if stack == "gate_up_proj" else [(parts[2], matrix)]
            for part, rows in matrices:
                yield f"{layer}.{block}.experts.{number}.{part}.weight", rows


def write_quantised(folder, oracle, config, writer, change=None):
    """Save ``oracle`` with each linear layer but the head as ``writer(name, weight)`` gives it; it then computes with the values.

    ``writer`` may return None, which leaves a layer plain; ``change`` may change what is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    oracle.config.save_pretrained(folder)
    tensors = {}
    with torch.no_grad():
        for name, parameter in parameters_of(oracle):
            layer = name.removesuffix(".weight")
            is_linear = name.endswith("_proj.weight") or ".experts." in name
            written = writer(layer, parameter.detach()) if is_linear else None
            if written is None:
                tensors[name] = parameter.detach().clone()
                continue
            parts, values = written
            names = {key: f"{layer}{key}" if key.startswith("_") else f"{layer}.{key}" for key in parts}
            tensors |= {names[key]: value.contiguous() for key, value in parts.items()}
            parameter.copy_(values)
    if oracle.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return tensors

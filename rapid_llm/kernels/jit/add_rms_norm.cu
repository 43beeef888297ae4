// residual += x in place, rounded to its type; then out = residual / sqrt(mean(residual ** 2) + eps) * weight, in fp32.
//
// One program a token, one piece of its row a thread at a time. A piece is 16 bytes where the token's rows and the weight lie on
// 16 bytes and the width is a multiple of a piece, one element elsewhere. A row of one piece a thread stays in registers between
// the two walks; of a longer one a thread reads back only what it stored itself, so no barrier is needed for that.
// There is no #include: NVRTC finds no header where no CUDA toolkit is installed.

// A format widens the elements of a 32-bit word to fp32 and rounds them back, half to even. An element alone is the low part.

struct Float32 {
  using Element = unsigned;
  enum { PER_WORD = 1 };

  static __device__ void widen(unsigned word, float* values) { values[0] = __uint_as_float(word); }

  static __device__ unsigned narrow(const float* values) { return __float_as_uint(values[0]); }
};

struct BFloat16 {
  using Element = unsigned short;
  enum { PER_WORD = 2 };

  static __device__ void widen(unsigned word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }

  static __device__ unsigned narrow(const float* values) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
};

struct Float16 {
  using Element = unsigned short;
  enum { PER_WORD = 2 };

  static __device__ void widen(unsigned word, float* values) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(values[0]), "=f"(values[1])
        : "r"(word));
  }

  static __device__ unsigned narrow(const float* values) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
};

// A piece as memory holds it. It is widened where it is used and no sooner, since widening waits for the load.
template <typename Format>
struct Wide {
  enum { COUNT = 4 * Format::PER_WORD };
  uint4 words;

  __device__ void load(const typename Format::Element* from) { words = *reinterpret_cast<const uint4*>(from); }

  __device__ void store(typename Format::Element* to) const { *reinterpret_cast<uint4*>(to) = words; }

  __device__ void widen(float* values) const {
    Format::widen(words.x, values);
    Format::widen(words.y, values + Format::PER_WORD);
    Format::widen(words.z, values + 2 * Format::PER_WORD);
    Format::widen(words.w, values + 3 * Format::PER_WORD);
  }

  __device__ void round(const float* values) {
    words.x = Format::narrow(values);
    words.y = Format::narrow(values + Format::PER_WORD);
    words.z = Format::narrow(values + 2 * Format::PER_WORD);
    words.w = Format::narrow(values + 3 * Format::PER_WORD);
  }
};

template <typename Format>
struct Single {
  enum { COUNT = 1 };
  unsigned word;

  __device__ void load(const typename Format::Element* from) { word = *from; }

  __device__ void store(typename Format::Element* to) const { *to = static_cast<typename Format::Element>(word); }

  __device__ void widen(float* values) const {
    float both[2];
    Format::widen(word, both);
    values[0] = both[0];
  }

  __device__ void round(const float* values) {
    const float both[2] = {values[0], 0.0f};
    word = Format::narrow(both);
  }
};

__device__ float sum_over_warp(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// The sum of every thread's value, in every thread. The order of the additions depends on the number of threads alone.
__device__ float sum_over_program(float value) {
  __shared__ float sums[32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  value = sum_over_warp(value);
  if (warps == 1) {
    return value;
  }
  if (lane == 0) {
    sums[threadIdx.x / 32] = value;
  }
  __syncthreads();
  return sum_over_warp(lane < warps ? sums[lane] : 0.0f);
}

template <typename Format, typename Piece>
__device__ void add_and_norm(const typename Format::Element* x, typename Format::Element* residual,
                             const typename Format::Element* weight, typename Format::Element* out, int d, float eps) {
  enum { COUNT = Piece::COUNT };
  const int first = threadIdx.x * COUNT, step = blockDim.x * COUNT;
  Piece scale, total;
  if (first < d) {
    scale.load(weight + first);  // asked for here, to have arrived when the sum over the threads has
  }
  float squares = 0.0f;
  for (int i = first; i < d; i += step) {
    Piece added;
    added.load(x + i);
    total.load(residual + i);
    float terms[COUNT], values[COUNT];
    added.widen(terms);
    total.widen(values);
    for (int j = 0; j < COUNT; ++j) {
      values[j] += terms[j];
    }
    total.round(values);
    total.store(residual + i);
    total.widen(values);  // the norm is that of what is stored
    for (int j = 0; j < COUNT; ++j) {
      squares += values[j] * values[j];
    }
  }
  const float inverse = rsqrtf(__fdividef(sum_over_program(squares), d) + eps);
  for (int i = first; i < d; i += step) {
    if (step < d) {  // several pieces a thread: registers hold the last one only
      scale.load(weight + i);
      total.load(residual + i);
    }
    float factors[COUNT], values[COUNT];
    scale.widen(factors);
    total.widen(values);
    for (int j = 0; j < COUNT; ++j) {
      values[j] = values[j] * inverse * factors[j];
    }
    Piece normed;
    normed.round(values);
    normed.store(out + i);
  }
}

template <typename Format>
__device__ void add_rms_norm(const void* x, void* residual, const void* weight, void* out, long long x_stride,
                             long long residual_stride, long long out_stride, int d, float eps) {
  using Element = typename Format::Element;
  const long long token = blockIdx.x;  // 64 bits: token * stride can pass 2 ** 31
  const Element* x_row = static_cast<const Element*>(x) + token * x_stride;
  Element* residual_row = static_cast<Element*>(residual) + token * residual_stride;
  const Element* weight_row = static_cast<const Element*>(weight);
  Element* out_row = static_cast<Element*>(out) + token * out_stride;
  const unsigned long long addresses =
      reinterpret_cast<unsigned long long>(x_row) | reinterpret_cast<unsigned long long>(residual_row) |
      reinterpret_cast<unsigned long long>(weight_row) | reinterpret_cast<unsigned long long>(out_row);
  if (addresses % 16 == 0 && d % Wide<Format>::COUNT == 0) {
    add_and_norm<Format, Wide<Format>>(x_row, residual_row, weight_row, out_row, d, eps);
  } else {
    add_and_norm<Format, Single<Format>>(x_row, residual_row, weight_row, out_row, d, eps);
  }
}

#define KERNEL(NAME, FORMAT)                                                                                            \
  extern "C" __global__ void __launch_bounds__(1024)                                                                    \
      NAME(const void* x, void* residual, const void* weight, void* out, long long x_stride, long long residual_stride, \
           long long out_stride, int d, float eps) {                                                                    \
    add_rms_norm<FORMAT>(x, residual, weight, out, x_stride, residual_stride, out_stride, d, eps);                      \
  }

KERNEL(add_rms_norm_float32, Float32)
KERNEL(add_rms_norm_bfloat16, BFloat16)
KERNEL(add_rms_norm_float16, Float16)

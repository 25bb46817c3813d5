// Sums over rows, and BatchNorm's two maps, of matrices [rows, channels] in row-major order.
//
// The macros STORED, WIDE and WIDTH are set by channels_on_gpu.py. Elements are stored as float, double, Half or Bfloat16,
// and computed in float, or double for double. A thread loads WIDTH adjacent channels at once; WIDTH divides `channels`.
//
// A sum is the same to the bit on every run: the shape, the type and the alignment of a matrix, and nothing of the GPU,
// decide which thread adds which rows, and in which order. A thread adds its rows in the computing type, and all later sums are in double.

typedef unsigned short Bits;

struct Half {
    Bits bits;
    __device__ operator float() const {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
        return wide;
    }
    __device__ Half& operator=(float wide) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
        return *this;
    }
};

struct Bfloat16 {
    Bits bits;
    __device__ operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
    __device__ Bfloat16& operator=(float wide) {
        unsigned all = __float_as_uint(wide);
        bool nan = (all & 0x7fffffffu) > 0x7f800000u;
        // Rounds to nearest, ties to even. A NaN must not become an infinity.
        bits = nan ? 0x7fc0 : static_cast<Bits>((all + 0x7fffu + ((all >> 16) & 1u)) >> 16);
        return *this;
    }
};

typedef STORED Stored;
typedef WIDE Wide;

struct alignas(sizeof(Stored) * WIDTH) Pack {
    Stored values[WIDTH];
};

// Rows that a thread loads before it adds them, so that their loads overlap.
const int AHEAD = 4;

// Adds the sums of the threads that share a column of the block, and stores them as one row of `partial`.
__device__ void store(double* shared, const Wide (&sums)[WIDTH], double* partial, int pack, int channels, int columns) {
    int lanes = blockDim.x * WIDTH;
    __syncthreads();
    for (int i = 0; i < WIDTH; ++i) {
        shared[threadIdx.y * lanes + threadIdx.x * WIDTH + i] = sums[i];
    }
    __syncthreads();
    if (threadIdx.y == 0 && pack * WIDTH < channels) {
        for (int i = 0; i < WIDTH; ++i) {
            double total = 0;
            for (int y = 0; y < blockDim.y; ++y) {
                total += shared[y * lanes + threadIdx.x * WIDTH + i];
            }
            partial[static_cast<long long>(blockIdx.y) * columns + pack * WIDTH + i] = total;
        }
    }
}

enum Kind { SUMS, SQUARES, GRADIENTS };

// partial[block][column] has the sums of x (SUMS), of (x - mean)^2 (SQUARES), or of dy and after them of dy * (x - mean)
// (GRADIENTS), which are two columns for a channel.
template <int KIND>
__device__ void reduce(
    const Pack* x, const Pack* dy, const Wide* mean, double* partial, long long rows, int channels
) {
    extern __shared__ double shared[];
    int packs = channels / WIDTH, pack = blockIdx.x * blockDim.x + threadIdx.x;
    Wide sums[WIDTH] = {}, others[WIDTH] = {}, middle[WIDTH] = {};
    if (pack < packs) {
        if (KIND != SUMS) {
            for (int i = 0; i < WIDTH; ++i) middle[i] = mean[pack * WIDTH + i];
        }
        long long stride = static_cast<long long>(gridDim.y) * blockDim.y;
        for (long long row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += AHEAD * stride) {
            Pack here[AHEAD], slopes[AHEAD];
#pragma unroll
            for (int n = 0; n < AHEAD; ++n) {
                if (row + n * stride < rows) {
                    here[n] = x[(row + n * stride) * packs + pack];
                    if (KIND == GRADIENTS) slopes[n] = dy[(row + n * stride) * packs + pack];
                }
            }
#pragma unroll
            for (int n = 0; n < AHEAD; ++n) {
                if (row + n * stride < rows) {
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) {
                        Wide centered = static_cast<Wide>(here[n].values[i]) - middle[i];
                        if (KIND == SUMS) sums[i] += centered;
                        if (KIND == SQUARES) sums[i] += centered * centered;
                        if (KIND == GRADIENTS) {
                            Wide slope = static_cast<Wide>(slopes[n].values[i]);
                            sums[i] += slope;
                            others[i] += slope * centered;
                        }
                    }
                }
            }
        }
    }
    int columns = KIND == GRADIENTS ? 2 * channels : channels;
    store(shared, sums, partial, pack, channels, columns);
    if (KIND == GRADIENTS) store(shared, others, partial + channels, pack, channels, columns);
}

extern "C" __global__ void sums(const Pack* x, double* partial, long long rows, int channels) {
    reduce<SUMS>(x, nullptr, nullptr, partial, rows, channels);
}

extern "C" __global__ void squares(const Pack* x, const Wide* mean, double* partial, long long rows, int channels) {
    reduce<SQUARES>(x, nullptr, mean, partial, rows, channels);
}

extern "C" __global__ void gradient_sums(
    const Pack* dy, const Pack* x, const Wide* mean, double* partial, long long rows, int channels
) {
    reduce<GRADIENTS>(x, dy, mean, partial, rows, channels);
}

// total[column] = the sum of partial[.][column]. A warp adds one column.
extern "C" __global__ void total(const double* partial, Wide* total, int parts, int columns) {
    int column = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (column >= columns) return;
    double sum = 0;
    for (int part = lane; part < parts; part += 32) sum += partial[static_cast<long long>(part) * columns + column];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (lane == 0) total[column] = static_cast<Wide>(sum);
}

// results has four rows of channels: 1 / sqrt(var + epsilon), the same times scale, and the moved running mean and
// variance. var is squares / count; the running variance takes squares / divisor.
extern "C" __global__ void statistics(
    const Wide* squares, const Wide* mean, const Wide* scale, const Wide* running_mean, const Wide* running_var,
    Wide* results, double count, double divisor, double momentum, double epsilon, int channels
) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    double inverse = 1 / sqrt(squares[channel] / count + epsilon);
    results[channel] = inverse;
    results[channels + channel] = inverse * scale[channel];
    results[2 * channels + channel] = (1 - momentum) * running_mean[channel] + momentum * mean[channel];
    results[3 * channels + channel] =
        (1 - momentum) * running_var[channel] + momentum * (squares[channel] / divisor);
}

// results has two rows of channels: the slope and the shift of input_gradient.
extern "C" __global__ void slope_and_shift(
    const Wide* products, const Wide* sums, const Wide* inverse, Wide* results, double count, int channels
) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    double factor = inverse[channel];
    results[channel] = products[channel] * factor * factor / -count;
    results[channels + channel] = sums[channel] / count;
}

// A map of each element of x, and of dy if there is one, by up to four vectors of the channels.
enum Map { SCALED, INPUT_GRADIENT };

template <int MAP>
__device__ void map(
    const Pack* dy, const Pack* x, const Wide* mean, const Wide* first, const Wide* second, const Wide* third, Pack* result,
    long long rows, int channels
) {
    int packs = channels / WIDTH, pack = blockIdx.x * blockDim.x + threadIdx.x;
    if (pack >= packs) return;
    Wide middle[WIDTH], one[WIDTH], two[WIDTH], three[WIDTH];
    for (int i = 0; i < WIDTH; ++i) {
        int channel = pack * WIDTH + i;
        middle[i] = mean[channel], one[i] = first[channel], two[i] = second[channel];
        three[i] = MAP == INPUT_GRADIENT ? third[channel] : 0;
    }
    long long stride = static_cast<long long>(gridDim.y) * blockDim.y;
    for (long long row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += AHEAD * stride) {
        Pack from[AHEAD], slopes[AHEAD];
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            if (row + n * stride < rows) {
                from[n] = x[(row + n * stride) * packs + pack];
                if (MAP == INPUT_GRADIENT) slopes[n] = dy[(row + n * stride) * packs + pack];
            }
        }
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            if (row + n * stride < rows) {
                Pack to;
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    Wide value = static_cast<Wide>(from[n].values[i]) - middle[i];
                    if (MAP == SCALED) {
                        value = value * one[i] + two[i];
                    } else {
                        value = (value * one[i] + static_cast<Wide>(slopes[n].values[i]) - two[i]) * three[i];
                    }
                    to.values[i] = value;
                }
                result[(row + n * stride) * packs + pack] = to;
            }
        }
    }
}

// y = (x - mean) * factor + bias
extern "C" __global__ void scaled(
    const Pack* x, const Wide* mean, const Wide* factor, const Wide* bias, Pack* y, long long rows, int channels
) {
    map<SCALED>(nullptr, x, mean, factor, bias, nullptr, y, rows, channels);
}

// dx = ((x - mean) * slope + dy - shift) * factor
extern "C" __global__ void input_gradient(
    const Pack* dy, const Pack* x, const Wide* mean, const Wide* slope, const Wide* shift, const Wide* factor, Pack* dx,
    long long rows, int channels
) {
    map<INPUT_GRADIENT>(dy, x, mean, slope, shift, factor, dx, rows, channels);
}

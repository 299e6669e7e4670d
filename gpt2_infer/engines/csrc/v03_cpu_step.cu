// v03 - a decode step on a CPU, in one parallel region
//
// Change: a whole step is one call of host code. It reads the weights as they are stored.
// Why:    eagerly, a step is some 80 operations, and a small model's take as long to start as to run.
// Cost:   each thread computes every LayerNorm that it needs, which saves a barrier per LayerNorm.
// Tile:   8 rows of a weight by kTile columns, or 4 columns that are stored one after another
// Layout: contiguous
// Role:   struct
// Takes:  float32, on the CPU
// Flags:  -Xcompiler=-fopenmp,-march=native,-ffp-contract=fast
// Expect: at batch 1, the time in which the memory or the cache delivers the weights.

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common.cuh"

namespace attention {

// A weight (rows, columns), stored row by row or, if transposed, column by column.
struct Matrix {
  const float* data;
  const float* bias;  // null for the logits
  int64_t rows;
  int64_t columns;
  int64_t is_transposed;
};

struct Norm {
  const float* weight;
  const float* bias;
};

struct Layer {
  Norm ln_1, ln_2;
  Matrix qkv, proj, fc, fc2;
  double softmax_scale;
};

struct StructParams {
  const Layer* layers;
  Norm ln_f;
  Matrix head;
  const float* wte;  // (vocab_size, n_embd), with any strides
  const float* wpe;  // (n_positions, n_embd)
  float* kv;         // (n_layer, 2, batch, num_heads, max_seqlen, head_dim)
  int* seqlens;      // (batch,): the cached positions of each row
  int64_t* newest;   // (batch,): the tokens to read; if is_greedy, the next ones replace them
  int64_t* tokens;   // (batch, capacity)
  int64_t* lengths;  // (batch,)
  float* logits;     // (batch, vocab_size)
  float* shared;     // (batch, 6 * n_embd + inner)
  float* own;        // (threads, batch * n_embd + max_seqlen)
  int64_t wte_strides[2];
  int64_t capacity, batch, layer_count, num_heads, max_seqlen, threads, is_greedy;
  int64_t no_token;  // the token for logits that are not finite
  double epsilon;
};

namespace ATTENTION_VERSION {

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kTile = 512;  // columns whose sums stay in the L1 cache, at any batch size
constexpr int kRows = 8;
constexpr int kMaxBatch = 8;
constexpr int kMaxThreads = 256;
constexpr int kChunksPerThread = 2;
constexpr int kSpins = 2000;  // some 50 us

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int VecInt __attribute__((vector_size(4 * kLanes)));

Vec load(const float* from) {
  Vec vec;
  std::memcpy(&vec, from, sizeof vec);
  return vec;
}

void store(float* to, Vec vec) { std::memcpy(to, &vec, sizeof vec); }

// Adds the lanes in pairs that are half a vector apart.
float sum_of(Vec vec) {
  float lanes[kLanes];
  store(lanes, vec);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Applies function to count floats, vector by vector.
template <typename Function>
void transform(float* x, int64_t count, const Function& function) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(x + i, function(load(x + i)));
  if (i == count) return;
  float rest[kLanes] = {};
  std::copy(x + i, x + count, rest);
  store(rest, function(load(rest)));
  std::copy(rest, rest + (count - i), x + i);
}

// Returns e^x to 2 units in the last place, 0 below -87 and NaN for NaN; x is at most 88.
Vec exp(Vec x) {
  const Vec power = x * 1.44269504f;
  const Vec magic = Vec{} + 12582912.0f;  // 1.5 * 2^23: rounds to an integer, in the low bits
  const Vec shifted = power + magic;
  const Vec whole = shifted - magic;
  const Vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vec sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * (r * r) + r + 1.0f;
  const VecInt exponent = ((VecInt)shifted - (VecInt)magic + 127) << 23;
  return x < -87.0f ? Vec{} : sum * (Vec)exponent;
}

// GELU's tanh form: x * sigmoid(2u), because (1 + tanh(u)) / 2 is sigmoid(2u).
Vec gelu(Vec x) {
  const Vec u2 = x * (1.5957691216f + 0.0713548162726f * (x * x));
  const Vec low = u2 < 0.0f ? u2 : -u2;  // e^-|2u| cannot overflow
  const Vec e = exp(low);
  return u2 < 0.0f ? x * e / (1.0f + e) : x / (1.0f + e);
}

// Rows of activations: row b begins at data + b * stride.
template <typename Float>
struct Rows {
  Float* data;
  int64_t stride;
};

// sums (batch, kTile) += x (batch, kCount) times kCount rows of w, of these columns.
template <int kCount>
void add_rows(const float* __restrict w, int64_t w_stride, Rows<const float> x, int batch,
              float* __restrict sums, int64_t columns) {
  int64_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    Vec rows[kCount];
    for (int r = 0; r < kCount; ++r) rows[r] = load(w + r * w_stride + j);
    for (int b = 0; b < batch; ++b) {
      const float* const factors = x.data + b * x.stride;
      Vec sum = rows[0] * factors[0];
      for (int r = 1; r < kCount; ++r) sum += rows[r] * factors[r];
      store(sums + b * kTile + j, load(sums + b * kTile + j) + sum);
    }
  }
  for (; j < columns; ++j) {
    for (int b = 0; b < batch; ++b) {
      const float* const factors = x.data + b * x.stride;
      float sum = w[j] * factors[0];
      for (int r = 1; r < kCount; ++r) sum += w[r * w_stride + j] * factors[r];
      sums[b * kTile + j] += sum;
    }
  }
}

// y (batch, columns) = x (batch, rows) W, for the columns [begin, end) of a W stored by rows.
void multiply_rows(const float* w, int64_t w_stride, int64_t rows, Rows<const float> x, int batch,
                   Rows<float> y, int64_t begin, int64_t end) {
  alignas(64) float sums[kMaxBatch * kTile];
  for (; begin < end; begin += kTile) {
    const int64_t columns = std::min<int64_t>(kTile, end - begin);
    std::fill_n(sums, batch * kTile, 0.0f);
    const auto add = [&](auto count, int64_t k) {
      const float* const from = w + k * w_stride + begin;
      const Rows<const float> factors = {x.data + k, x.stride};
      if (batch == 1)  // the compiler then keeps the factors in registers
        add_rows<count>(from, w_stride, factors, 1, sums, columns);
      else
        add_rows<count>(from, w_stride, factors, batch, sums, columns);
    };
    int64_t k = 0;
    for (; k + kRows <= rows; k += kRows) add(std::integral_constant<int, kRows>(), k);
    for (; k < rows; ++k) add(std::integral_constant<int, 1>(), k);
    for (int b = 0; b < batch; ++b)
      std::copy_n(sums + b * kTile, columns, y.data + b * y.stride + begin);
  }
}

// y (kBatch, kCount) = x (kBatch, rows) times kCount columns of a W that is stored by columns.
template <int kBatch, int kCount>
void dot_columns(const float* w, int64_t rows, Rows<const float> x, Rows<float> y) {
  Vec sums[kCount][kBatch] = {};
  int64_t k = 0;
  for (; k + kLanes <= rows; k += kLanes) {
    for (int j = 0; j < kCount; ++j) {
      const Vec column = load(w + j * rows + k);
      for (int b = 0; b < kBatch; ++b) sums[j][b] += column * load(x.data + b * x.stride + k);
    }
  }
  for (int j = 0; j < kCount; ++j) {
    for (int b = 0; b < kBatch; ++b) {
      float sum = sum_of(sums[j][b]);
      for (int64_t i = k; i < rows; ++i) sum += w[j * rows + i] * x.data[b * x.stride + i];
      y.data[b * y.stride + j] = sum;
    }
  }
}

// As multiply_rows(), for a W stored by columns.
void multiply_columns(const float* w, int64_t rows, Rows<const float> x, int batch, Rows<float> y,
                      int64_t begin, int64_t end) {
  constexpr int kCount = 4, kGroup = 4;
  const auto add = [&](auto count, int64_t j) {
    int b = 0;
    const auto group = [&](auto size) {
      for (; b + size <= batch; b += size)
        dot_columns<size, count>(w + j * rows, rows, {x.data + b * x.stride, x.stride},
                                 {y.data + b * y.stride + j, y.stride});
    };
    group(std::integral_constant<int, kGroup>());
    group(std::integral_constant<int, 1>());
  };
  for (; begin + kCount <= end; begin += kCount) add(std::integral_constant<int, kCount>(), begin);
  for (; begin < end; ++begin) add(std::integral_constant<int, 1>(), begin);
}

// y = x W for the columns [begin, end) of W.
void multiply(const Matrix& w, const float* x, int batch, float* y, int64_t begin, int64_t end) {
  if (w.is_transposed)
    multiply_columns(w.data, w.rows, {x, w.rows}, batch, {y, w.columns}, begin, end);
  else
    multiply_rows(w.data, w.columns, w.rows, {x, w.rows}, batch, {y, w.columns}, begin, end);
}

// The threads' common state. A phase is divided into chunks. A thread takes its own first, then
// those that no other thread has taken; so one that the system has suspended is not waited for.
class Team {
 public:
  explicit Team(int threads) : chunks_(threads * kChunksPerThread) {}

  int chunks() const { return chunks_; }

  // Runs work(chunk) for all chunks, on all threads, and waits for all of them.
  template <typename Work>
  void run(int thread, int& phase, const Work& work) {
    ++phase;
    for (int i = 0; i < chunks_; ++i) {
      const int chunk = (thread * kChunksPerThread + i) % chunks_;
      int previous = phase - 1;
      if (taken_[chunk].phase.compare_exchange_strong(previous, phase, std::memory_order_relaxed)) {
        work(chunk);
        done_.fetch_add(1, std::memory_order_acq_rel);
      }
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < phase * chunks_; ++spins) {
      if (spins >= kSpins) sched_yield();
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

 private:
  struct alignas(64) Taken {
    std::atomic<int> phase{0};
  };
  const int chunks_;
  alignas(64) std::atomic<int> done_{0};
  Taken taken_[kMaxThreads * kChunksPerThread];
};

class Step {
 public:
  explicit Step(const StructParams& params, int threads)
      : p(params),
        batch(static_cast<int>(params.batch)),
        embd(params.layers[0].proj.columns),
        inner(params.layers[0].fc.columns),
        head_dim(embd / params.num_heads),
        team_(threads),
        x(params.shared),
        qkv(x + batch * embd),
        heads(qkv + 3 * batch * embd),
        out(heads + batch * embd),
        hidden(out + batch * embd) {}

  // Runs one thread's part.
  void run(int thread) {
    float* const normed = p.own + thread * (batch * embd + p.max_seqlen);
    float* const scores = normed + batch * embd;
    int phase = 0;
    // work(begin, end) of each chunk of the columns, after a LayerNorm if there is one
    const auto each = [&](int64_t columns, const Norm* norm, const auto& work) {
      bool is_normed = norm == nullptr;
      team_.run(thread, phase, [&](int chunk) {
        const int64_t begin = bound(columns, chunk), end = bound(columns, chunk + 1);
        if (begin == end) return;
        if (!is_normed) normalize(*norm, normed);
        is_normed = true;
        work(begin, end);
      });
    };
    each(embd, nullptr, [&](int64_t begin, int64_t end) { embed(begin, end); });
    for (int64_t n = 0; n < p.layer_count; ++n) {
      const Layer& layer = p.layers[n];
      each(3 * embd, &layer.ln_1, [&](int64_t begin, int64_t end) {
        multiply(layer.qkv, normed, batch, qkv, begin, end);
        for (int b = 0; b < batch; ++b)
          for (int64_t j = begin; j < end; ++j) qkv[b * 3 * embd + j] += layer.qkv.bias[j];
      });
      team_.run(thread, phase, [&](int chunk) {
        const int64_t all = batch * p.num_heads;
        for (int64_t i = all * chunk / team_.chunks(); i < all * (chunk + 1) / team_.chunks(); ++i)
          attend(n, i / p.num_heads, i % p.num_heads, scores);
      });
      each(embd, nullptr, [&](int64_t begin, int64_t end) {
        multiply(layer.proj, heads, batch, out, begin, end);
        add_to_x(layer.proj, begin, end);
      });
      each(inner, &layer.ln_2, [&](int64_t begin, int64_t end) {
        multiply(layer.fc, normed, batch, hidden, begin, end);
        for (int b = 0; b < batch; ++b) {
          float* const row = hidden + b * inner;
          for (int64_t j = begin; j < end; ++j) row[j] += layer.fc.bias[j];
          transform(row + begin, end - begin, gelu);
        }
      });
      each(embd, nullptr, [&](int64_t begin, int64_t end) {
        multiply(layer.fc2, hidden, batch, out, begin, end);
        add_to_x(layer.fc2, begin, end);
      });
    }
    each(p.head.columns, &p.ln_f, [&](int64_t begin, int64_t end) {
      multiply(p.head, normed, batch, p.logits, begin, end);
    });
  }

 private:
  // The first column of a chunk; a vector is never divided, so that a column's sum is always
  // computed in the same way.
  int64_t bound(int64_t columns, int chunk) const {
    const int64_t vectors = (columns + kLanes - 1) / kLanes;
    return std::min(vectors * chunk / team_.chunks() * kLanes, columns);
  }

  void embed(int64_t begin, int64_t end) {
    for (int b = 0; b < batch; ++b) {
      const float* const token = p.wte + std::max<int64_t>(p.newest[b], 0) * p.wte_strides[0];
      const float* const position = p.wpe + p.seqlens[b] * embd;
      for (int64_t j = begin; j < end; ++j)
        x[b * embd + j] = token[j * p.wte_strides[1]] + position[j];
    }
  }

  void normalize(const Norm& norm, float* normed) const {
    for (int b = 0; b < batch; ++b) {
      const float* const row = x + b * embd;
      float* const to = normed + b * embd;
      const float mean = sum(row, 0.0f, false) / embd;
      const float variance = sum(row, mean, true) / embd;
      const float scale = 1.0f / std::sqrt(variance + static_cast<float>(p.epsilon));
      for (int64_t j = 0; j < embd; ++j)
        to[j] = (row[j] - mean) * scale * norm.weight[j] + norm.bias[j];
    }
  }

  // Sums row - mean over the columns, or its squares.
  float sum(const float* row, float mean, bool is_squared) const {
    Vec total = {};
    int64_t j = 0;
    for (; j + kLanes <= embd; j += kLanes) {
      const Vec d = load(row + j) - mean;
      total += is_squared ? d * d : d;
    }
    float found = sum_of(total);
    for (; j < embd; ++j) found += is_squared ? (row[j] - mean) * (row[j] - mean) : row[j] - mean;
    return found;
  }

  // Appends a row's key and value of one head to the cache and attends from it.
  void attend(int64_t layer, int64_t b, int64_t head, float* scores) const {
    const int64_t size = p.max_seqlen * head_dim, seqlen = p.seqlens[b] + 1;
    float* const k = p.kv + ((layer * 2 * batch + b) * p.num_heads + head) * size;
    float* const v = k + batch * p.num_heads * size;
    const float* const q = qkv + b * 3 * embd + head * head_dim;
    std::copy_n(q + embd, head_dim, k + (seqlen - 1) * head_dim);
    std::copy_n(q + 2 * embd, head_dim, v + (seqlen - 1) * head_dim);
    multiply_columns(k, head_dim, {q, 0}, 1, {scores, 0}, 0, seqlen);
    const float scale = static_cast<float>(p.layers[layer].softmax_scale);
    float row_max = -INFINITY;
    for (int64_t i = 0; i < seqlen; ++i) row_max = std::max(row_max, scores[i] * scale);
    transform(scores, seqlen, [&](Vec s) { return exp(s * scale - row_max); });
    float row_sum = 0.0f;
    for (int64_t i = 0; i < seqlen; ++i) row_sum += scores[i];
    float* const o = heads + b * embd + head * head_dim;
    multiply_rows(v, head_dim, seqlen, {scores, 0}, 1, {o, 0}, 0, head_dim);
    for (int64_t j = 0; j < head_dim; ++j) o[j] /= row_sum;
  }

  void add_to_x(const Matrix& w, int64_t begin, int64_t end) const {
    for (int b = 0; b < batch; ++b)
      for (int64_t j = begin; j < end; ++j) x[b * embd + j] += out[b * embd + j] + w.bias[j];
  }

  const StructParams& p;
  const int batch;
  const int64_t embd, inner, head_dim;
  Team team_;
  float* const x;
  float* const qkv;
  float* const heads;
  float* const out;
  float* const hidden;
};

// The most likely token; the first of several, and -1 if no logit is finite or one is NaN or inf.
int64_t most_likely(const float* logits, int64_t count) {
  int64_t token = 0;
  for (int64_t j = 0; j < count; ++j) {
    if (logits[j] != logits[j]) return -1;
    if (logits[j] > logits[token]) token = j;
  }
  return std::isinf(logits[token]) ? -1 : token;
}

void run_step(const StructParams& p) {
  const int wanted = static_cast<int>(std::min<int64_t>(p.threads, kMaxThreads));
  Step step(p, wanted);
#pragma omp parallel num_threads(wanted)
  step.run(omp_get_thread_num());
  for (int b = 0; b < p.batch; ++b) {
    ++p.seqlens[b];
    if (!p.is_greedy) continue;
    const int64_t token = most_likely(p.logits + b * p.head.columns, p.head.columns);
    p.newest[b] = token < 0 ? p.no_token : token;
    p.tokens[b * p.capacity + p.lengths[b]++] = p.newest[b];
  }
}

}  // namespace

int64_t scratch_floats(const StructParams&) { return 0; }

cudaError_t launch(const StructParams& p, cudaStream_t) {
  if (p.batch < 1 || p.batch > kMaxBatch) return cudaErrorInvalidValue;
  run_step(p);
  return cudaSuccess;
}

}  // namespace ATTENTION_VERSION
}  // namespace attention

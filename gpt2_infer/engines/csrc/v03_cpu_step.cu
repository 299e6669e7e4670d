// v03 - a decode step on a CPU, in one parallel region
//
// Change: a whole step is one call of host code. It reads the weights as they are stored.
// Why:    eagerly, a step is some 80 operations, and a small model's take as long to start as to run.
// Cost:   every thread computes every LayerNorm, which saves a barrier for each.
// Tile:   8 rows of a weight by kTile columns; single columns of a weight that is stored by columns
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

#include "common.cuh"
#include "cpu_products.h"

namespace attention {

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
  double epsilon;
};

namespace ATTENTION_VERSION {

namespace {

constexpr int kMaxThreads = 128;
constexpr int kChunksPerThread = 2;
constexpr int kPatience = 200;  // spins before a thread takes others' chunks, some 5 us
constexpr int kSpins = 2000;    // spins before it yields its core

// The threads' common state. A phase is divided into chunks. Each thread takes its own; if it then
// waits for long, it also takes those that no thread has begun. So one that the system has suspended
// between two chunks is not waited for.
class Team {
 public:
  explicit Team(int threads) : chunks_(threads * kChunksPerThread) {}

  int chunks() const { return chunks_; }

  // Runs work(chunk) for all chunks, on all threads, and waits for all of them.
  template <typename Work>
  void run(int thread, int& phase, const Work& work) {
    ++phase;
    const int own = thread * kChunksPerThread;
    take(own, own + kChunksPerThread, phase, work);
    for (int spins = 0; done_.load(std::memory_order_acquire) < phase * chunks_; ++spins) {
      if (spins == kPatience) take(0, chunks_, phase, work);
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

  // Runs the chunks [begin, end) that no thread has begun.
  template <typename Work>
  void take(int begin, int end, int phase, const Work& work) {
    int finished = 0;
    for (int chunk = begin; chunk < end; ++chunk) {
      std::atomic<int>& taken = taken_[chunk].phase;
      int previous = phase - 1;
      if (taken.load(std::memory_order_relaxed) != previous ||
          !taken.compare_exchange_strong(previous, phase, std::memory_order_relaxed))
        continue;
      work(chunk);
      ++finished;
    }
    if (finished > 0) done_.fetch_add(finished, std::memory_order_acq_rel);
  }

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
        team(threads),
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
      team.run(thread, phase, [&](int chunk) {
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
      team.run(thread, phase, [&](int chunk) {
        const int64_t all = batch * p.num_heads;
        for (int64_t i = all * chunk / team.chunks(); i < all * (chunk + 1) / team.chunks(); ++i)
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
    return std::min(vectors * chunk / team.chunks() * kLanes, columns);
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
      const float mean = sum_over(row, embd, [](Vec v) { return v; }) / embd;
      const auto square = [=](Vec v) { return (v - mean) * (v - mean); };
      const float variance = sum_over(row, embd, square) / embd;
      const float scale = 1.0f / std::sqrt(variance + static_cast<float>(p.epsilon));
      for (int64_t j = 0; j < embd; ++j)
        to[j] = (row[j] - mean) * scale * norm.weight[j] + norm.bias[j];
    }
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
    transform(scores, seqlen, [=](Vec s) { return s * scale; });
    const float row_max = largest_of(scores, seqlen, -INFINITY);
    transform(scores, seqlen, [=](Vec s) { return exp(s - row_max); });
    const float row_sum = sum_over(scores, seqlen, [](Vec p) { return p; });
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
  Team team;
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
    p.newest[b] = most_likely(p.logits + b * p.head.columns, p.head.columns);
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

// v02 - one decode step as a chain of kernels, each launched before its input is ready
//
// Change: instead of one persistent kernel, five kernels per layer: q, k and v; attention; the
//         heads' projection; the hidden units; their projection. Each starts before the previous
//         ones end (programmatic dependent launch) and loads what no kernel of the step writes: a
//         block its weights, in one bulk copy; attention the keys and values of earlier steps. Then
//         it waits. LayerNorm, bias, GELU and residual are part of the products.
//         If STEP_ONE_KERNEL, one kernel runs all layers instead.
// Why:    the end of a kernel is a cheaper way to exchange data than words that all blocks poll: it
//         takes the same time whatever the batch. It needs no tags, and no grid whose blocks must
//         all run at once.
// Cost:   a second, packed copy of the layers' weights. Every block of a product that follows a
//         LayerNorm recomputes it. A block's weights must fit in its shared memory.
// Tile:   STEP_*_COLUMNS columns per block, all of K; a lane has 16 bytes of a row; 128 keys per split
// Layout: strided
// Role:   struct
// Takes:  float32 float16 bfloat16
// Flags:  (none)
// Expect: latency is the bottleneck at batch 1, memory bandwidth for gpt2-xl, and the products'
//         instructions for larger batches in float32. The one kernel has no launches between
//         layers, and requests weights as soon as it has room for them.
//
// Weights leave the L2 cache first, since a step reads them once; so keys, values, vectors and what
// blocks exchange stay there.
//
// Sums are in float32, in an order that depends neither on timing nor on the other rows of the
// batch. 16-bit weights are multiplied on tensor cores, so activations are rounded to 16 bits, too.
//
// The kernels are in step/, built for one model's shape and batch size: fused.py sets the macros.

#include "step/chain.cuh"   // a layer's kernels: products and attention
#include "step/logits.cuh"  // the product with the embedding
#include "step/tokens.cuh"  // the embeddings, guesses, and the choice of the next tokens
#if STEP_ONE_KERNEL
#include "step/layers_at_once.cuh"  // all layers in one kernel
#endif

namespace attention::ATTENTION_VERSION {

// The caller keeps the scratch alive between launches.
int64_t scratch_floats(const StepParams&) { return sizeof(Scratch) / sizeof(float); }

cudaError_t launch(const StepParams& p, cudaStream_t stream) {
  // Not launched early, because it reads what the previous step writes. So that step has ended
  // before this one begins, and every kernel may read seqlens before it waits.
#if STEP_ONE_KERNEL
  Chain chain{stream, launch_layers(p, stream)};
#else
  Chain chain{stream, launch_kernel(embed, ceil_div(kBatch * kEmbd, kEmbedThreads), kEmbedThreads,
                                    0, stream, p)};
  for (int layer = 0; layer < p.layers; ++layer) {
    chain.add_product<kQkv>(p, layer);
    chain.add_attention(p, layer);
    chain.add_product<kProj>(p, layer);
    chain.add_product<kFc>(p, layer);
    chain.add_product<kFc2>(p, layer);
  }
#endif
  chain.add(head, kHeadBlocks, 1, kLogitThreads, kHeadBytes, p);
  chain.add(choose, 1, 1, 32 * kBatch, 0, p);
  return chain.error;
}

}  // namespace attention::ATTENTION_VERSION

// Packed QKV, as a GPT-2 training loop has it
// Entry:   attention_forward(o, qkv, B, N, H * D, H, stream)
// Tensors: BN3HD
// Only:    causal && std::abs(scale * std::sqrt(float(D)) - 1) < 1e-6f
// Takes:   float32, head_dim 32 64
#include "dispatch.cu"

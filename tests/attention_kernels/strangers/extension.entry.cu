// A PyTorch extension
// Entry:   forward(q, k, v)
// Tensors: BHND
// Only:    causal && std::abs(scale * std::sqrt(float(D)) - 1) < 1e-6f
// Takes:   float32 float16, head_dim 32 64
#include "extension.cu"

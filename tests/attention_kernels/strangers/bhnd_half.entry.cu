// Half precision over (B, H, N, D) tensors
// Entry:   attention_bhnd<D><<<dim3((N + 63) / 64, H, B), 64>>>(q, k, v, o, N, scale)
// Tensors: BHND
// Only:    causal
// Takes:   float16, head_dim 32 64
#include "bhnd_half.cu"

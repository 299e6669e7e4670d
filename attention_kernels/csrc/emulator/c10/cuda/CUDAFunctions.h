#include "../../torch_device.h"  // PyTorch's own needs CUDA

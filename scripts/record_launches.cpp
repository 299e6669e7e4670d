// Saves the launches of any program's kernels for `gpt2-infer predict`: name, grid, block, cluster, shared
// memory, the bytes of each parameter, and the cubin. CUPTI reports them; that needs no permission, as counters
// do. What lies between cudaProfilerStart() and cudaProfilerStop() is saved, into folders 0, 1, ... of
// RECORD_FOLDER, each with a file `arguments` for predict.
//
//   g++ -std=c++17 -shared -fPIC -I$CUDA/include -o record.so scripts/record_launches.cpp -lcupti -lcuda
//   CUDA_INJECTION64_PATH=$PWD/record.so RECORD_FOLDER=records python program.py

#include <cuda.h>
#include <cupti.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

namespace {

std::recursive_mutex guard;  // to ask for parameters may load a module
std::vector<std::string> modules;
bool is_on = false;
int launches = 0;

struct Launch {
  CUfunction kernel;
  const char* name;
  unsigned grid[3], block[3], shared;
  void **parameters, **extra;
  unsigned cluster[3] = {1, 1, 1};
};

// Reads the size of the kernel's clusters if it was compiled for one.
void read_cluster(Launch& launch) {
  constexpr CUfunction_attribute kSizes[] = {CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
                                             CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
                                             CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH};
  CUdevice device;
  cuCtxGetDevice(&device);
  for (int axis = 0; axis < 3; ++axis) {
    int size = 0;
    // As for parameters, below
    if (cuFuncGetAttribute(&size, kSizes[axis], launch.kernel) != CUDA_SUCCESS)
      cuKernelGetAttribute(&size, kSizes[axis], reinterpret_cast<CUkernel>(launch.kernel), device);
    if (size > 0) launch.cluster[axis] = size;
  }
}

// The kernel's parameters, each as a string of bytes
std::vector<std::string> parameters_of(const Launch& launch) {
  const char* buffer = nullptr;  // with all of them, instead of pointers to each
  for (void** at = launch.extra; at && *at != CU_LAUNCH_PARAM_END; at += 2) {
    if (*at == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = static_cast<const char*>(at[1]);
  }
  std::vector<std::string> found;
  for (size_t offset, size;;) {
    // A handle may be one of a kernel that belongs to no context.
    if (cuFuncGetParamInfo(launch.kernel, found.size(), &offset, &size) != CUDA_SUCCESS &&
        cuKernelGetParamInfo(reinterpret_cast<CUkernel>(launch.kernel), found.size(), &offset,
                             &size) != CUDA_SUCCESS)
      return found;
    const void* from = buffer ? buffer + offset : launch.parameters[found.size()];
    found.emplace_back(static_cast<const char*>(from), size);
  }
}

void save(Launch launch) {
  if (!launch.name && cuFuncGetName(&launch.name, launch.kernel) != CUDA_SUCCESS) {
    std::fprintf(stderr, "a launch of a kernel without a name is not saved\n");
    return;
  }
  read_cluster(launch);
  const std::filesystem::path root = std::getenv("RECORD_FOLDER");
  const auto folder = root / std::to_string(launches++);
  std::filesystem::create_directories(folder);
  std::ofstream arguments(folder / "arguments");
  arguments << (folder / "kernel.cubin").string() << " --kernel " << launch.name;
  const auto axes = [&](const char* option, const unsigned (&of)[3]) {
    arguments << option << of[0] << ',' << of[1] << ',' << of[2];
  };
  axes(" --grid ", launch.grid);
  axes(" --block ", launch.block);
  axes(" --cluster ", launch.cluster);
  arguments << " --shared " << launch.shared << " --args";
  int number = 0;
  for (const std::string& bytes : parameters_of(launch)) {
    const auto file = folder / std::to_string(number++);
    std::ofstream(file, std::ios::binary) << bytes;
    arguments << " @" << file.string();
  }
  arguments << '\n';
  const auto section = std::string(".text.") + launch.name + '\0';
  for (const std::string& cubin : modules) {
    if (cubin.find(section) != cubin.npos) std::ofstream(folder / "kernel.cubin") << cubin;
  }
}

template <typename Parameters>
Launch of(const Parameters& p, const char* name) {
  return {p.f,
          name,
          {p.gridDimX, p.gridDimY, p.gridDimZ},
          {p.blockDimX, p.blockDimY, p.blockDimZ},
          p.sharedMemBytes,
          p.kernelParams,
          p.extra};
}

void CUPTIAPI on_event(void*, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data) {
  const std::lock_guard<std::recursive_mutex> lock(guard);
  if (domain == CUPTI_CB_DOMAIN_RESOURCE) {
    const auto* of_module = static_cast<const CUpti_ModuleResourceData*>(
        static_cast<const CUpti_ResourceData*>(data)->resourceDescriptor);
    modules.emplace_back(of_module->pCubin, of_module->cubinSize);
    return;
  }
  const auto* call = static_cast<const CUpti_CallbackData*>(data);
  if (call->callbackSite != CUPTI_API_ENTER) return;
  const void* given = call->functionParams;
  switch (id) {
    case CUPTI_DRIVER_TRACE_CBID_cuProfilerStart:
    case CUPTI_DRIVER_TRACE_CBID_cuProfilerStop:
      is_on = id == CUPTI_DRIVER_TRACE_CBID_cuProfilerStart;
      return;
    case CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel:
    case CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz:
      if (is_on) save(of(*static_cast<const cuLaunchKernel_params*>(given), call->symbolName));
      return;
    case CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx:
    case CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz: {
      if (!is_on) return;
      const auto& p = *static_cast<const cuLaunchKernelEx_params*>(given);
      const auto& c = *p.config;
      Launch launch{p.f,
                    call->symbolName,
                    {c.gridDimX, c.gridDimY, c.gridDimZ},
                    {c.blockDimX, c.blockDimY, c.blockDimZ},
                    c.sharedMemBytes,
                    p.kernelParams,
                    p.extra};
      for (unsigned i = 0; i < c.numAttrs; ++i) {
        if (c.attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
        const auto& [x, y, z] = c.attrs[i].value.clusterDim;
        launch.cluster[0] = x, launch.cluster[1] = y, launch.cluster[2] = z;
      }
      save(launch);
      return;
    }
  }
}

}  // namespace

// Called by the CUDA driver when it loads the library.
extern "C" int InitializeInjection() {
  CUpti_SubscriberHandle subscriber;
  return cuptiSubscribe(&subscriber, on_event, nullptr) == CUPTI_SUCCESS &&
         cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_RESOURCE,
                             CUPTI_CBID_RESOURCE_MODULE_LOADED) == CUPTI_SUCCESS &&
         cuptiEnableDomain(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API) == CUPTI_SUCCESS;
}

"""Answers of the stub of CUDA: bodies of C functions, by name. Every other function of the libraries returns success.

Arguments have the names of CUDA's own headers. Streams and events are addresses on the heap; an event holds the host's
clock at its record, so that elapsed times are the host's. Memory of the device is address space of the host: copies are
made, kernels compute nothing. One stream at a time can be captured; a graph holds nothing.
"""

from __future__ import annotations

from typing import NamedTuple


class Prototype(NamedTuple):
    """A function as a header declares it."""

    result: str
    parameters: str


DEVICES = 8
MEMORY_BYTES = 80 * 2**30
DEVICE_BYTES = 2**38
"""Address space of all devices' memory: pages exist once a copy has written them, and are never given back."""
PINNED_BYTES = 2**34
"""Address space of pinned memory of the host: pages exist once they are written, and are never given back."""
NAME = "Fake GPU of 80 GiB"
MULTIPROCESSORS = 132
THREADS_PER_MULTIPROCESSOR = 2048
THREADS_PER_BLOCK = 1024
WARP_SIZE = 32
L2_CACHE_BYTES = 50 * 2**20
MAJOR, MINOR = 9, 0

SHARED_STATE = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#define DEVICES {DEVICES}
#define MEMORY_BYTES {MEMORY_BYTES}ull
#define PINNED_BYTES {PINNED_BYTES}ull
#define DEVICE_BYTES {DEVICE_BYTES}ull
#define DEVICE_ADDRESS 0x600000000000ull
static __thread int current;
static uintptr_t next_address = DEVICE_ADDRESS;
static double now_ms(void) {{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}}
static void *new_handle(void) {{ return calloc(1, sizeof(double)); }}
static void *new_memory(size_t bytes) {{
    uintptr_t aligned = (bytes + 511) / 512 * 512;
    return (void *)__atomic_fetch_add(&next_address, aligned, __ATOMIC_SEQ_CST);
}}
static char *pinned_begin, *pinned_next;
__attribute__((constructor)) static void reserve_memory(void) {{
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *all = mmap(NULL, PINNED_BYTES, PROT_READ | PROT_WRITE, kind, -1, 0);
    mmap((void *)DEVICE_ADDRESS, DEVICE_BYTES, PROT_READ | PROT_WRITE, kind | MAP_FIXED_NOREPLACE, -1, 0);
    pinned_begin = pinned_next = all == MAP_FAILED ? NULL : all;
}}
static void *new_pinned(size_t bytes) {{
    char *begin = __atomic_fetch_add(&pinned_next, (bytes + 511) / 512 * 512, __ATOMIC_SEQ_CST);
    return pinned_begin && begin + bytes <= pinned_begin + PINNED_BYTES ? begin : NULL;
}}
static int is_pinned(const void *address) {{
    return pinned_begin && (char *)address >= pinned_begin && (char *)address < pinned_begin + PINNED_BYTES;
}}
static int is_ours(const void *address) {{
    return is_pinned(address) || ((uintptr_t)address >= DEVICE_ADDRESS && (uintptr_t)address < next_address);
}}
static int is_on_device(const void *address) {{
    return (uintptr_t)address >= DEVICE_ADDRESS && (uintptr_t)address < __atomic_load_n(&next_address, __ATOMIC_SEQ_CST);
}}
"""

RUNTIME_HELPERS = f"""
static void *captured_stream;
static int is_capturing;
static int attribute(enum cudaDeviceAttr attr, int device) {{
    switch (attr) {{
    case cudaDevAttrMaxThreadsPerBlock: return {THREADS_PER_BLOCK};
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return {THREADS_PER_BLOCK};
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrWarpSize: return {WARP_SIZE};
    case cudaDevAttrMultiProcessorCount: return {MULTIPROCESSORS};
    case cudaDevAttrMaxThreadsPerMultiProcessor: return {THREADS_PER_MULTIPROCESSOR};
    case cudaDevAttrL2CacheSize: return {L2_CACHE_BYTES};
    case cudaDevAttrComputeCapabilityMajor: return {MAJOR};
    case cudaDevAttrComputeCapabilityMinor: return {MINOR};
    case cudaDevAttrPciBusId: return device + 1;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrMemoryPoolsSupported: return 1;
    default: return 0;
    }}
}}
static cudaError_t entry_point(const char *symbol, void **address, enum cudaDriverEntryPointQueryResult *status) {{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    *address = driver ? dlsym(driver, "fake_driver_function") : NULL;
    *address = *address ? ((void *(*)(const char *))*address)(symbol) : NULL;
    if (status) *status = *address ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *address ? cudaSuccess : cudaErrorSymbolNotFound;
}}
"""

_NEW_STREAM = "*pStream = (cudaStream_t)new_handle();"
_NEW_EVENT = "*event = (cudaEvent_t)new_handle();"
_NEW_MEMORY = "*devPtr = new_memory(size);"
_STATUS = (
    "is_capturing && captured_stream == (void *)stream ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;"
)
_NEW_GRAPH = "*pGraphExec = (cudaGraphExec_t)new_handle();"
_NEW_PINNED = "return {} ? cudaSuccess : cudaErrorMemoryAllocation;"
_COPY = "if (is_ours(dst) || is_ours(src)) memmove(dst, src, count);"
_FILL = "if (is_ours(devPtr)) memset(devPtr, value, count);"
_RECORD = "if (event) *(double *)event = now_ms();"

RUNTIME_ANSWERS = {
    # As many devices as the variable lists; which ones makes no difference here.
    "cudaGetDeviceCount": """
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        *count = visible ? *visible != 0 : DEVICES;
        for (; visible && *visible; visible++) *count += *visible == ',';
        if (!*count) return cudaErrorNoDevice;""",
    "cudaGetDevice": "*device = current;",
    "cudaSetDevice": "if (device < 0 || device >= DEVICES) return cudaErrorInvalidDevice; current = device;",
    "cudaDriverGetVersion": "*driverVersion = CUDART_VERSION;",
    "cudaRuntimeGetVersion": "*runtimeVersion = CUDART_VERSION;",
    "cudaGetErrorName": 'return error ? "cudaErrorFake" : "cudaSuccess";',
    "cudaGetErrorString": 'return error ? "an error of the stub of CUDA" : "no error";',
    "cudaGetDeviceProperties": f"""
        memset(prop, 0, sizeof *prop);
        strcpy(prop->name, "{NAME}");
        memset(prop->uuid.bytes, device + 1, sizeof prop->uuid.bytes);
        prop->totalGlobalMem = MEMORY_BYTES;
        prop->major = {MAJOR};
        prop->minor = {MINOR};
        prop->multiProcessorCount = {MULTIPROCESSORS};
        prop->warpSize = {WARP_SIZE};
        prop->maxThreadsPerBlock = {THREADS_PER_BLOCK};
        prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = {THREADS_PER_BLOCK};
        prop->maxThreadsDim[2] = 64;
        prop->maxGridSize[0] = 2147483647;
        prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
        prop->maxThreadsPerMultiProcessor = {THREADS_PER_MULTIPROCESSOR};
        prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
        prop->sharedMemPerBlock = 49152;
        prop->sharedMemPerBlockOptin = 232448;
        prop->sharedMemPerMultiprocessor = 233472;
        prop->l2CacheSize = {L2_CACHE_BYTES};
        prop->pciBusID = device + 1;
        prop->unifiedAddressing = prop->concurrentKernels = 1;""",
    "cudaDeviceGetAttribute": "*value = attribute(attr, device);",
    "cudaDeviceGetPCIBusId": 'snprintf(pciBusId, len, "0000:%02x:00.0", device + 1);',
    "cudaDeviceCanAccessPeer": "*canAccessPeer = device != peerDevice;",
    "cudaDeviceGetStreamPriorityRange": "*leastPriority = 0; *greatestPriority = -5;",
    "cudaDeviceGetDefaultMemPool": "*memPool = (cudaMemPool_t)(DEVICE_ADDRESS + device);",
    "cudaMemGetInfo": "*free = *total = MEMORY_BYTES;",
    "cudaMalloc": _NEW_MEMORY,
    "cudaMallocManaged": _NEW_MEMORY,
    "cudaMallocAsync": _NEW_MEMORY,
    "cudaMemcpy": _COPY,
    "cudaMemcpyAsync": _COPY,
    "cudaMemset": _FILL,
    "cudaMemsetAsync": _FILL,
    "cudaHostAlloc": _NEW_PINNED.format("(*pHost = new_pinned(size))"),
    "cudaMallocHost": _NEW_PINNED.format("(*ptr = new_pinned(size))"),
    "cudaHostGetDevicePointer": "*pDevice = pHost;",
    "cudaPointerGetAttributes": """
        memset(attributes, 0, sizeof *attributes);
        attributes->type = is_on_device(ptr) ? cudaMemoryTypeDevice
            : is_pinned(ptr) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
        attributes->device = is_on_device(ptr) ? current : -2;
        attributes->devicePointer = is_on_device(ptr) ? (void *)ptr : NULL;
        attributes->hostPointer = is_on_device(ptr) ? NULL : (void *)ptr;""",
    "cudaStreamCreate": _NEW_STREAM,
    "cudaStreamCreateWithFlags": _NEW_STREAM,
    "cudaStreamCreateWithPriority": _NEW_STREAM,
    "cudaStreamDestroy": "free(stream);",
    "cudaStreamGetPriority": "*priority = 0;",
    "cudaStreamGetFlags": "*flags = 0;",
    "cudaStreamGetId": "*streamId = (unsigned long long)(uintptr_t)hStream;",
    "cudaStreamGetDevice": "*device = current;",
    "cudaStreamIsCapturing": f"*pCaptureStatus = {_STATUS}",
    "cudaStreamGetCaptureInfo": f"*captureStatus_out = {_STATUS} if (id_out) *id_out = is_capturing;",
    "cudaStreamBeginCapture": "captured_stream = (void *)stream; is_capturing = 1;",
    "cudaStreamEndCapture": "is_capturing = 0; *pGraph = (cudaGraph_t)new_handle();",
    "cudaGraphInstantiate": _NEW_GRAPH,
    "cudaGraphInstantiateWithFlags": _NEW_GRAPH,
    "cudaGraphGetNodes": "if (numNodes) *numNodes = 1;",
    "cudaEventCreate": _NEW_EVENT,
    "cudaEventCreateWithFlags": _NEW_EVENT,
    "cudaEventDestroy": "free(event);",
    "cudaEventRecord": _RECORD,
    "cudaEventRecordWithFlags": _RECORD,
    "cudaEventElapsedTime": "*ms = (float)(*(double *)end - *(double *)start);",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor": "*numBlocks = 1;",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": "*numBlocks = 1;",
    "cudaFuncGetAttributes": f"""
        memset(attr, 0, sizeof *attr);
        attr->maxThreadsPerBlock = {THREADS_PER_BLOCK};
        attr->binaryVersion = attr->ptxVersion = {10 * MAJOR + MINOR};""",
    "cudaGetDriverEntryPoint": "return entry_point(symbol, funcPtr, driverStatus);",
    "cudaGetDriverEntryPointByVersion": "return entry_point(symbol, funcPtr, driverStatus);",
}

DRIVER_HELPERS = """
static long succeed(void) { return 0; }
void *fake_driver_function(const char *name) {
    static const char *const versions[] = {"_v4", "_v3", "_v2", ""};
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    char symbol[256];
    for (int number = 0; self && number < 4; number++) {
        snprintf(symbol, sizeof symbol, "%s%s", name, versions[number]);
        void *address = dlsym(self, symbol);
        if (address) return address;
    }
    return (void *)succeed;
}
"""

_CONTEXT = "(CUcontext)(DEVICE_ADDRESS + 0x1000 * (current + 1))"
_ENTRY_POINT = "*pfn = fake_driver_function(symbol); if (symbolStatus) *symbolStatus = CU_GET_PROC_ADDRESS_SUCCESS;"

DRIVER_ANSWERS = {
    "cuDriverGetVersion": "*driverVersion = CUDA_VERSION;",
    "cuGetErrorName": '*pStr = error ? "CUDA_ERROR_FAKE" : "CUDA_SUCCESS";',
    "cuGetErrorString": '*pStr = error ? "an error of the stub of CUDA" : "no error";',
    "cuGetProcAddress_v2": _ENTRY_POINT,
    "cuGetExportTable": "*ppExportTable = NULL; return CUDA_ERROR_NOT_FOUND;",
    "cuDeviceGet": "*device = ordinal;",
    "cuDeviceGetCount": "*count = DEVICES;",
    "cuDeviceGetName": f'snprintf(name, len, "{NAME}");',
    "cuDeviceGetUuid_v2": "memset(uuid->bytes, dev + 1, sizeof uuid->bytes);",
    "cuDeviceTotalMem_v2": "*bytes = MEMORY_BYTES;",
    "cuDevicePrimaryCtxGetState": "*flags = 0; *active = 1;",
    "cuDevicePrimaryCtxRetain": f"*pctx = {_CONTEXT};",
    "cuCtxGetCurrent": f"*pctx = {_CONTEXT};",
    "cuCtxGetDevice": "*device = current;",
    "cuMemGetInfo_v2": "*free = *total = MEMORY_BYTES;",
    "cuStreamIsCapturing": "*captureStatus = CU_STREAM_CAPTURE_STATUS_NONE;",
    "cuStreamCreate": "*phStream = (CUstream)new_handle();",
    "cuStreamCreateWithPriority": "*phStream = (CUstream)new_handle();",
    "cuEventCreate": "*phEvent = (CUevent)new_handle();",
    "cuEventElapsedTime_v2": "*pMilliseconds = (float)(*(double *)hEnd - *(double *)hStart);",
}

CUBLAS_ANSWERS = {"cublasCreate_v2": "*handle = new_handle();"}
CUBLASLT_ANSWERS = {"cublasLtCreate": "*handle = new_handle();", "cublasLtMatmulAlgoGetHeuristic": "*count = 1;"}
"""Products compute nothing, as all kernels."""
CUBLAS_PROTOTYPES = {
    "cublasCreate_v2": Prototype("int", "void **handle"),
    "cublasLtCreate": Prototype("int", "void **handle"),
    "cublasLtMatmulAlgoGetHeuristic": Prototype(
        "int",
        "void *handle, void *product, void *a, void *b, void *c, void *d, void *wish, int wanted, void *found, int *count",
    ),
}

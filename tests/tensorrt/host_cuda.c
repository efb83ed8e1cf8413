/* The functions of NVIDIA's driver that engines/trt/cuda.py calls, on host memory: what its ctypes declarations are
   tested against. Prototypes are those of cuda.h (CUDA 13), which this file does not include; -DREAL_HEADER compares
   them. */

#ifdef REAL_HEADER
#include <cuda.h>
#else
#include <stddef.h>
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUarray_st *CUarray;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef int CUmemPool_attribute;
typedef struct CUDA_MEMCPY3D_st {
    size_t srcXInBytes;
    size_t srcY;
    size_t srcZ;
    size_t srcLOD;
    int srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    void *reserved0;
    size_t srcPitch;
    size_t srcHeight;
    size_t dstXInBytes;
    size_t dstY;
    size_t dstZ;
    size_t dstLOD;
    int dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    void *reserved1;
    size_t dstPitch;
    size_t dstHeight;
    size_t WidthInBytes;
    size_t Height;
    size_t Depth;
} CUDA_MEMCPY3D;
#define cuMemcpyHtoDAsync cuMemcpyHtoDAsync_v2
#define cuMemcpyDtoHAsync cuMemcpyDtoHAsync_v2
#define cuMemcpy3DAsync cuMemcpy3DAsync_v2
#endif
#include <stdlib.h>
#include <string.h>

static _Thread_local CUcontext current;
static CUcontext primary = (CUcontext)0x1234567890;
static CUstream only = (CUstream)0xABCDEF012345;
static long long live;

#define CHECK(condition, status) \
    if (!(condition)) return (CUresult)(status)
#define ON_STREAM(stream)                 \
    CHECK(current == primary, 201);       \
    CHECK(stream == only, 400)

CUresult cuInit(unsigned int flags) { return (CUresult)(flags ? 1 : 0); }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CHECK(ordinal == 0, 101);
    *device = 3;
    return (CUresult)0;
}

unsigned long long host_pool_keeps = 0; /* read by tests: bytes that a pool keeps when it is synchronised */

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    CHECK(device == 3, 101);
    *pool = (CUmemoryPool)&host_pool_keeps;
    return (CUresult)0;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    CHECK((void *)pool == &host_pool_keeps && attribute == 4, 1);
    host_pool_keeps = *(unsigned long long *)value;
    return (CUresult)0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CHECK(device == 3, 101);
    *context = primary;
    return (CUresult)0;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return (CUresult)0;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    CHECK(current == primary && flags == 1, 201);
    *stream = only;
    return (CUresult)0;
}

CUresult cuStreamSynchronize(CUstream stream) {
    ON_STREAM(stream);
    return (CUresult)0;
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream stream) {
    ON_STREAM(stream);
    CHECK(size < ((size_t)1 << 40), 2);
    void *block = NULL;
    CHECK(posix_memalign(&block, 256, size) == 0, 2);
    memset(block, 0xFF, size);
    *address = (CUdeviceptr)(size_t)block;
    live++;
    return (CUresult)0;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    ON_STREAM(stream);
    free((void *)(size_t)address);
    live--;
    return (CUresult)0;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    ON_STREAM(stream);
    memcpy((void *)(size_t)target, source, size);
    return (CUresult)0;
}

CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    ON_STREAM(stream);
    memcpy(target, (void *)(size_t)source, size);
    return (CUresult)0;
}

CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D *copy, CUstream stream) {
    ON_STREAM(stream);
    CHECK(!copy->srcXInBytes && !copy->srcY && !copy->srcZ && !copy->srcLOD && !copy->reserved0, 1);
    CHECK(!copy->dstXInBytes && !copy->dstY && !copy->dstZ && !copy->dstLOD && !copy->reserved1, 1);
    CHECK((int)copy->srcMemoryType == 2 && (int)copy->dstMemoryType == 2, 1);
    CHECK(!copy->srcHost && !copy->dstHost && !copy->srcArray && !copy->dstArray, 1);
    CHECK(copy->WidthInBytes <= copy->srcPitch && copy->WidthInBytes <= copy->dstPitch, 1);
    CHECK(copy->Height <= copy->srcHeight && copy->Height <= copy->dstHeight, 1);
    for (size_t slice = 0; slice < copy->Depth; slice++)
        for (size_t line = 0; line < copy->Height; line++)
            memcpy((char *)(size_t)copy->dstDevice + (slice * copy->dstHeight + line) * copy->dstPitch,
                   (const char *)(size_t)copy->srcDevice + (slice * copy->srcHeight + line) * copy->srcPitch,
                   copy->WidthInBytes);
    return (CUresult)0;
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t size, CUstream stream) {
    ON_STREAM(stream);
    memset((void *)(size_t)target, value, size);
    return (CUresult)0;
}

CUresult cuGetErrorString(CUresult status, const char **text) {
    switch ((int)status) {
    case 2: *text = "out of memory"; break;
    case 400: *text = "invalid resource handle"; break;
    default: *text = "something else";
    }
    return (CUresult)0;
}

long long live_blocks(void) { return live; }

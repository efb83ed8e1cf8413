/* The functions of NVIDIA's driver that cuda_memory.py calls, on host memory: what its ctypes declarations are tested
   against. Prototypes are those of cuda.h (CUDA 13), which this file does not include; -DREAL_HEADER compares them. */

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
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUgraphNode_st *CUgraphNode;
typedef enum CUstreamCaptureMode_enum { CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1 } CUstreamCaptureMode;
typedef struct CUDA_MEMCPY2D_st {
    size_t srcXInBytes;
    size_t srcY;
    int srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    size_t srcPitch;
    size_t dstXInBytes;
    size_t dstY;
    int dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    size_t dstPitch;
    size_t WidthInBytes;
    size_t Height;
} CUDA_MEMCPY2D;
#define cuMemcpyHtoDAsync cuMemcpyHtoDAsync_v2
#define cuMemcpyDtoHAsync cuMemcpyDtoHAsync_v2
#define cuMemcpy2DAsync cuMemcpy2DAsync_v2
#define cuStreamBeginCapture cuStreamBeginCapture_v2
#define cuGraphInstantiate cuGraphInstantiateWithFlags
#endif
#include <stdlib.h>
#include <string.h>

static _Thread_local CUcontext current;
static CUcontext primary = (CUcontext)0x1234567890;
static CUstream only = (CUstream)0xABCDEF012345;
static long long live, live_graphs;

/* What is captured: fills and copies on the device. A graph made of it is a copy, and so is an executable one. */
typedef struct {
    int is_copy;
    CUDA_MEMCPY2D copy;
    CUdeviceptr target;
    unsigned char value;
    size_t size;
} Work;
typedef struct {
    size_t count;
    Work work[8];
} Recording;
static int capturing, spoilt;
static Recording recording;

#define CHECK(condition, status) \
    if (!(condition)) return (CUresult)(status)
#define ON_STREAM(stream)                 \
    CHECK(current == primary, 201);       \
    CHECK(stream == only, 400)
/* What must not be captured spoils the capture, as the real driver does it. */
#define NOT_CAPTURING()                   \
    if (capturing) {                      \
        spoilt = 1;                       \
        return (CUresult)900;             \
    }

CUresult cuInit(unsigned int flags) { return (CUresult)(flags ? 1 : 0); }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CHECK(ordinal == 0, 101);
    *device = 3;
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
    NOT_CAPTURING();
    return (CUresult)0;
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream stream) {
    ON_STREAM(stream);
    NOT_CAPTURING();
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
    NOT_CAPTURING();
    free((void *)(size_t)address);
    live--;
    return (CUresult)0;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    ON_STREAM(stream);
    NOT_CAPTURING();
    memcpy((void *)(size_t)target, source, size);
    return (CUresult)0;
}

CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    ON_STREAM(stream);
    NOT_CAPTURING();
    memcpy(target, (void *)(size_t)source, size);
    return (CUresult)0;
}

static CUresult work_on(const Work *work) {
    const CUDA_MEMCPY2D *copy = &work->copy;
    if (capturing) {
        CHECK(recording.count < 8, 1);
        recording.work[recording.count++] = *work;
        return (CUresult)0;
    }
    if (!work->is_copy) {
        memset((void *)(size_t)work->target, work->value, work->size);
        return (CUresult)0;
    }
    for (size_t line = 0; line < copy->Height; line++)
        memcpy((char *)(size_t)copy->dstDevice + line * copy->dstPitch,
               (const char *)(size_t)copy->srcDevice + line * copy->srcPitch, copy->WidthInBytes);
    return (CUresult)0;
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *copy, CUstream stream) {
    ON_STREAM(stream);
    CHECK(!copy->srcXInBytes && !copy->srcY && !copy->dstXInBytes && !copy->dstY, 1);
    CHECK((int)copy->srcMemoryType == 2 && (int)copy->dstMemoryType == 2, 1);
    CHECK(!copy->srcHost && !copy->dstHost && !copy->srcArray && !copy->dstArray, 1);
    CHECK(copy->WidthInBytes <= copy->srcPitch && copy->WidthInBytes <= copy->dstPitch, 1);
    Work work = {.is_copy = 1, .copy = *copy};
    return work_on(&work);
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t size, CUstream stream) {
    ON_STREAM(stream);
    Work work = {.target = target, .value = value, .size = size};
    return work_on(&work);
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    ON_STREAM(stream);
    CHECK(!capturing && mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 1);
    capturing = 1;
    spoilt = 0;
    recording.count = 0;
    return (CUresult)0;
}

static Recording *copy_of(const Recording *source) {
    Recording *copy = malloc(sizeof *copy);
    *copy = *source;
    live_graphs++;
    return copy;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    ON_STREAM(stream);
    CHECK(capturing, 1);
    capturing = 0;
    *graph = NULL;
    CHECK(!spoilt, 901);
    *graph = (CUgraph)copy_of(&recording);
    return (CUresult)0;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    CHECK(graph && !nodes, 1);
    *count = ((const Recording *)graph)->count;
    return (CUresult)0;
}

CUresult cuGraphInstantiate(CUgraphExec *executable, CUgraph graph, unsigned long long flags) {
    CHECK(graph && flags == 0, 1);
    *executable = (CUgraphExec)copy_of((const Recording *)graph);
    return (CUresult)0;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    ON_STREAM(stream);
    NOT_CAPTURING();
    const Recording *found = (const Recording *)executable;
    for (size_t i = 0; i < found->count; i++) work_on(&found->work[i]);
    return (CUresult)0;
}

CUresult cuGraphDestroy(CUgraph graph) {
    free(graph);
    live_graphs--;
    return (CUresult)0;
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
    NOT_CAPTURING();
    free(executable);
    live_graphs--;
    return (CUresult)0;
}

CUresult cuGetErrorString(CUresult status, const char **text) {
    switch ((int)status) {
    case 2: *text = "out of memory"; break;
    case 400: *text = "invalid resource handle"; break;
    case 900: *text = "operation not permitted when stream is capturing"; break;
    case 901: *text = "operation failed due to a previous error during capture"; break;
    default: *text = "something else";
    }
    return (CUresult)0;
}

long long live_blocks(void) { return live; }
long long graphs_alive(void) { return live_graphs; }

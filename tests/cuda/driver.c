/* A driver that has no GPU, as libcuda.so.1: what cuda-core asks of it to load a kernel by its name
 * and to launch it. A launch is handed to `qt_on_launch`, which the test sets; a kernel that the
 * cubin does not have, or that was unloaded with it, and a thread without a context are errors as
 * they are there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { DONE = 0, INVALID_VALUE = 1, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500 };
enum { KERNELS = 256 };

typedef struct {
    unsigned int grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void *stream;
    void *attributes;
    unsigned int attribute_count;
} Launch;

typedef struct {
    const char *code; /* the cubin: ELF, whose strings hold the names of its kernels */
    size_t size;
    int unloaded;
} Library;

typedef struct {
    char name[128];
    const Library *from;
} Kernel;

static Library libraries[KERNELS];
static Kernel kernels[KERNELS];
static int library_count, kernel_count, context;
static _Thread_local void *current;

int (*qt_on_launch)(const char *kernel, const Launch *launch, void **parameters);

int cuInit(unsigned int flags)
{
    (void)flags;
    return DONE;
}
int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return DONE;
}
int cuDeviceGetCount(int *count)
{
    *count = 1;
    return DONE;
}
int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return DONE;
}
int cuDeviceGetName(char *name, int length, int device)
{
    (void)device;
    snprintf(name, (size_t)length, "no GPU");
    return DONE;
}
/* 75 and 76 are the compute capability. */
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == 75 ? 9 : 0;
    return DONE;
}
int cuDevicePrimaryCtxRetain(void **found, int device)
{
    (void)device;
    *found = &context;
    return DONE;
}
int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    return DONE;
}
int cuCtxGetCurrent(void **found)
{
    *found = current;
    return DONE;
}
int cuCtxSetCurrent(void *asked)
{
    current = asked;
    return DONE;
}
int cuCtxGetDevice(int *device)
{
    *device = 0;
    return current ? DONE : NO_CONTEXT;
}

int cuStreamGetCtx(void *stream, void **found)
{
    (void)stream;
    *found = &context;
    return DONE;
}

/* All that a cubin says of its length: where its section headers end. */
static size_t length_of(const char *code)
{
    uint64_t at;
    uint16_t size, count;
    memcpy(&at, code + 40, 8);
    memcpy(&size, code + 58, 2);
    memcpy(&count, code + 60, 2);
    return (size_t)at + (size_t)size * count;
}
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned int c, void *d,
                      void *e, unsigned int f)
{
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    if (!current)
        return NO_CONTEXT;
    if (memcmp(code, "\177ELF", 4) != 0 || library_count == KERNELS)
        return INVALID_VALUE;
    libraries[library_count].code = code;
    libraries[library_count].size = length_of(code);
    *library = &libraries[library_count++];
    return DONE;
}
int cuLibraryUnload(void *library)
{
    ((Library *)library)->unloaded = 1;
    return DONE;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name)
{
    const Library *from = library;
    char section[160];
    int length = snprintf(section, sizeof section, ".text.%s", name);
    if (!memmem(from->code, from->size, section, (size_t)length + 1) || kernel_count == KERNELS)
        return NOT_FOUND;
    snprintf(kernels[kernel_count].name, sizeof kernels[0].name, "%s", name);
    kernels[kernel_count].from = from;
    *kernel = &kernels[kernel_count++];
    return DONE;
}
int cuLaunchKernelEx(const Launch *launch, void *kernel, void **parameters, void **extra)
{
    const Kernel *asked = kernel;
    (void)extra;
    if (!current)
        return NO_CONTEXT;
    if (asked->from->unloaded)
        return BAD_HANDLE;
    return qt_on_launch ? qt_on_launch(asked->name, launch, parameters) : INVALID_VALUE;
}

int cuGetErrorName(int error, const char **name)
{
    static _Thread_local char said[32];
    snprintf(said, sizeof said, "error %d", error);
    *name = said;
    return DONE;
}
int cuGetErrorString(int error, const char **text)
{
    return cuGetErrorName(error, text);
}

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
    void *own = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    char second[128];
    (void)version, (void)flags;
    snprintf(second, sizeof second, "%s_v2", name);
    *found = own ? dlsym(own, second) : 0;
    if (own && !*found)
        *found = dlsym(own, name);
    if (status)
        *status = *found ? 0 : 1;
    return *found ? DONE : NOT_FOUND;
}

/* A stand-in for NVIDIA's libnvidia-ml.so.1: two GPUs that exist only in this file.
 *
 * tests/test_nvml.py compiles it and puts it on LD_LIBRARY_PATH of a child process, so that the
 * real pynvml bindings run without a GPU. GPU 0 swings between 100 % and 0 %; GPU 1 stays at
 * 40 %. Environment variables set the rest:
 *
 *   NVML_STUB_INIT          "mismatch" or "not loaded": what nvmlInit answers
 *   NVML_STUB_UNSUPPORTED   calls that answer "not supported", e.g. "utilization,power"
 *   NVML_STUB_PERIOD_MS     period of GPU 0 (default 400)
 *   NVML_STUB_BAD_NAME      set: the names hold the byte 0xf8, which is not UTF-8
 *   NVML_STUB_PID           number of the process that holds device memory
 *   NVML_STUB_LOG           file that gets a line per nvmlInit and nvmlShutdown
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
       TOO_SMALL = 7, NOT_LOADED = 9, MISMATCH = 18 };
enum { GPUS = 2, UNSIGNED_INT = 1, RING = 120, SAMPLE_US = 20000 };

typedef unsigned long long u64;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } Process;
typedef union { double d; unsigned ui; u64 ull; } Value;
typedef struct { u64 time_us; Value value; } Sample;

static int users = 0;
static int handles[GPUS];
static const char *uuids[GPUS] = {"GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
                                  "GPU-ab12cd34-0000-1111-2222-333344445555"};

static int unsupported(const char *call) {
    const char *list = getenv("NVML_STUB_UNSUPPORTED");
    return list && strstr(list, call);
}

static int refused(const char *call) {
    return users == 0 ? UNINITIALIZED : unsupported(call) ? NOT_SUPPORTED : OK;
}

static void record(const char *line) {
    const char *path = getenv("NVML_STUB_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) { fprintf(file, "%s\n", line); fclose(file); }
}

static u64 now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (u64)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* Percent busy in the last window_us before end_us. */
static unsigned busy(int gpu, u64 end_us, u64 window_us) {
    const char *text = getenv("NVML_STUB_PERIOD_MS");
    u64 period_us = (u64)(text ? atoi(text) : 400) * 1000, on = 0;
    if (gpu == 1) return 40;
    for (u64 i = 0; i < 100; i++)
        on += (end_us - i * window_us / 100) % period_us < period_us / 2;
    return (unsigned)on;
}

static int number(void *device) { return (int)((int *)device - handles); }

static int copy(char *text, unsigned length, const char *source) {
    if (strlen(source) >= length) return TOO_SMALL;
    strcpy(text, source);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    const char *answer = getenv("NVML_STUB_INIT");
    (void)flags;
    if (answer && strcmp(answer, "mismatch") == 0) return MISMATCH;
    if (answer && strcmp(answer, "not loaded") == 0) return NOT_LOADED;
    users++;
    record("init");
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (users == 0) return UNINITIALIZED;
    users--;
    record("shutdown");
    return OK;
}

const char *nvmlErrorString(int code) {
    return code == MISMATCH ? "Driver/library version mismatch" : "an error of the stand-in";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = GPUS;
    return refused("count");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= GPUS) return INVALID;
    *device = &handles[index];
    return refused("handle");
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    for (int i = 0; i < GPUS; i++)
        if (strcmp(uuid, uuids[i]) == 0) { *device = &handles[i]; return OK; }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    int code = refused("uuid");
    return code ? code : copy(text, length, uuids[number(device)]);
}

int nvmlDeviceGetName(void *device, char *text, unsigned length) {
    int code = refused("name");
    (void)device;
    return code ? code : copy(text, length, getenv("NVML_STUB_BAD_NAME") ? "GPU \xf8" : "Stand-in");
}

int nvmlDeviceGetUtilizationRates(void *device, Utilization *answer) {
    answer->gpu = busy(number(device), now_us(), 50000);
    answer->memory = 10;
    return refused("utilization");
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *answer) {
    answer->total = 8ULL << 30;
    answer->used = 1079263232ULL * (number(device) + 1);
    answer->free = answer->total - answer->used;
    return refused("memory");
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 150500 + 1000 * number(device);
    return refused("power");
}

int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) {
    (void)device;
    (void)kind;
    *mhz = 1410;
    return refused("clock");
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *processes) {
    const char *pid = getenv("NVML_STUB_PID");
    int code = refused("processes");
    unsigned room = *count;
    (void)device;
    if (code) return code;
    *count = pid ? 1 : 0;
    if (!pid) return OK;
    if (!processes || room < 1) return TOO_SMALL;
    processes[0] = (Process){(unsigned)atoi(pid), 512ULL << 20, 0, 0};
    return OK;
}

/* The ring buffer: a sample each SAMPLE_US, the last RING of them; empty slots have time 0. */
int nvmlDeviceGetSamples(void *device, int kind, u64 last_us, int *type, unsigned *count,
                         Sample *samples) {
    u64 newest = now_us() / SAMPLE_US * SAMPLE_US;
    int code = refused("samples");
    (void)kind;
    if (code) return code;
    if (newest <= last_us) return NOT_FOUND;
    *type = UNSIGNED_INT;
    *count = RING;
    if (!samples) return OK;
    memset(samples, 0, RING * sizeof *samples);
    for (int i = 0; i < RING; i++) {
        u64 time_us = newest - (u64)(RING - 1 - i) * SAMPLE_US;
        if (time_us <= last_us) continue;
        samples[i].time_us = time_us;
        samples[i].value.ui = busy(number(device), time_us, SAMPLE_US);
    }
    return OK;
}

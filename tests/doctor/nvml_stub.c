// Test double: a libnvidia-ml.so.1 with $STUB_CARDS cards of $STUB_TOTAL MiB, of which
// $STUB_USED are in use, by $STUB_PROCESSES (id:MiB,id:MiB; -1 MiB is "not available").
// It starts with the code $STUB_NVML after $STUB_NVML_SLEEP s, and lists processes with
// the code $STUB_LIST. With -DOLD it is older than the functions that list processes.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct {
  unsigned int pid;
  unsigned long long used;
  unsigned int gpu_instance, compute_instance;
} Process;

static long env(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value ? atol(value) : otherwise;
}

int nvmlInit_v2(void) {
  sleep(env("STUB_NVML_SLEEP", 0));
  return env("STUB_NVML", 0);
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
  *count = env("STUB_CARDS", 1);
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **card) {
  *card = (void *)(size_t)(index + 1);
  return 0;
}

int nvmlDeviceGetMemoryInfo(void *card, Memory *memory) {
  memory->total = env("STUB_TOTAL", 16384) << 20;
  memory->used = env("STUB_USED", 0) << 20;
  memory->free = memory->total - memory->used;
  return 0;
}

#ifndef OLD
static int list(const char *text, unsigned int *count, Process *found) {
  unsigned int room = *count, here = 0;
  if (env("STUB_LIST", 0)) return env("STUB_LIST", 0);
  for (; text && *text; here++) {
    char *end;
    unsigned int pid = strtoul(text, &end, 10);
    long long mebibytes = strtoll(end + 1, &end, 10);
    if (here < room) {
      memset(&found[here], 0xff, sizeof *found);
      found[here].pid = pid;
      if (mebibytes >= 0) found[here].used = mebibytes << 20;
    }
    text = *end ? end + 1 : end;
  }
  *count = here;
  return here > room ? 7 : 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned int *count, Process *found) {
  return list(getenv("STUB_PROCESSES"), count, found);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *card, unsigned int *count, Process *found) {
  return list(getenv("STUB_GRAPHICS"), count, found);
}
#endif

// Lets file operations of a process fail, or kill it at one: preloaded by faults.py.
//
// Of the operations on paths that contain `part`, changes alone or reads alone, those
// from number `first` on, `length` of them, fail with errno `code`, or send the signal
// -`code`, or for 0 come after a copy of the folder `part` to `copies`/NUMBER: what a
// kill there would leave. Reads of lists of folders and of attributes are not among them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static char part[256], copies[256];
static pthread_mutex_t alone = PTHREAD_MUTEX_INITIALIZER;
static atomic_long count, first, length;
static atomic_int code, reads, armed;

void faults_arm(const char *name, int of_reads, long from, long many, int error) {
  armed = 0;
  snprintf(part, sizeof part, "%s", name);
  reads = of_reads;
  first = from;
  length = many;
  code = error;
  count = 0;
  armed = 1;
}

void faults_copies(const char *folder) {
  snprintf(copies, sizeof copies, "%s", folder);
}

long faults_disarm(void) {  // Returns the number of operations since it was armed.
  armed = 0;
  return count;
}

static void copy(long number) {  // While no other operation begins.
  char target[300];
  snprintf(target, sizeof target, "%s/%ld", copies, number);
  char *arguments[] = {"cp", "-a", part, target, NULL};
  char *variables[] = {"PATH=/usr/bin:/bin", NULL};
  pid_t child;
  int status;
  pthread_mutex_lock(&alone);
  if (posix_spawnp(&child, "cp", NULL, NULL, arguments, variables) == 0)
    waitpid(child, &status, 0);
  pthread_mutex_unlock(&alone);
}

static int fails(const char *path, int is_read) {
  if (!armed || path == NULL || is_read != reads || strstr(path, part) == NULL) return 0;
  long number = count++;
  if (number < first || number >= first + length) return 0;
  if (code < 0) kill(getpid(), -code), pause();
  if (code == 0) {
    copy(number);
    return 0;
  }
  errno = code;
  return 1;
}

static int fails_fd(int fd, int is_read) {
  if (!armed) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails(path, is_read);
}

#define NEXT(name) \
  static __typeof__(&name) next; \
  if (next == NULL) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define IS_READ(flags) (((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) == 0)
#define MODE(flags) \
  mode_t mode = 0; \
  if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list rest; \
    va_start(rest, flags); \
    mode = va_arg(rest, mode_t); \
    va_end(rest); \
  }

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    NEXT(name); \
    MODE(flags) \
    return fails(path, IS_READ(flags)) ? -1 : next(path, flags, mode); \
  }
#define OPENAT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    NEXT(name); \
    MODE(flags) \
    return fails(path, IS_READ(flags)) ? -1 : next(folder, path, flags, mode); \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define CHANGE(name, path, parameters, arguments) \
  int name parameters { \
    NEXT(name); \
    return fails(path, 0) ? -1 : next arguments; \
  }
CHANGE(mkdir, a, (const char *a, mode_t m), (a, m))
CHANGE(mkdirat, a, (int f, const char *a, mode_t m), (f, a, m))
CHANGE(rename, a, (const char *a, const char *b), (a, b))
CHANGE(renameat, a, (int f, const char *a, int g, const char *b), (f, a, g, b))
CHANGE(renameat2, a, (int f, const char *a, int g, const char *b, unsigned x),
       (f, a, g, b, x))
CHANGE(unlink, a, (const char *a), (a))
CHANGE(rmdir, a, (const char *a), (a))

int unlinkat(int folder, const char *path, int flags) {  // Mostly of a name alone.
  NEXT(unlinkat);
  return fails_fd(folder, 0) ? -1 : next(folder, path, flags);
}

#define ON_FD(type, name, is_read, parameters, arguments) \
  type name parameters { \
    NEXT(name); \
    return fails_fd(fd, is_read) ? -1 : next arguments; \
  }
ON_FD(ssize_t, write, 0, (int fd, const void *b, size_t n), (fd, b, n))
ON_FD(ssize_t, pwrite, 0, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(ssize_t, pwrite64, 0, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
ON_FD(ssize_t, writev, 0, (int fd, const struct iovec *v, int n), (fd, v, n))
ON_FD(ssize_t, pwritev, 0, (int fd, const struct iovec *v, int n, off_t o),
      (fd, v, n, o))
ON_FD(int, fsync, 0, (int fd), (fd))
ON_FD(int, fdatasync, 0, (int fd), (fd))
ON_FD(int, ftruncate, 0, (int fd, off_t n), (fd, n))
ON_FD(int, ftruncate64, 0, (int fd, off64_t n), (fd, n))
ON_FD(ssize_t, read, 1, (int fd, void *b, size_t n), (fd, b, n))
ON_FD(ssize_t, pread, 1, (int fd, void *b, size_t n, off_t o), (fd, b, n, o))
ON_FD(ssize_t, pread64, 1, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
ON_FD(ssize_t, preadv, 1, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o))

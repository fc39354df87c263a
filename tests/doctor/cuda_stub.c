// Test double: a libcuda.so.1 whose cuInit fails with $STUB_CUINIT that reports $STUB_DRIVER, and that hangs for $STUB_SLEEP s.
#include <stdlib.h>
#include <unistd.h>
static int env(const char*k,int d){const char*v=getenv(k);return v?atoi(v):d;}
int cuInit(unsigned f){sleep(env("STUB_SLEEP",0));return env("STUB_CUINIT",0);}
int cuDriverGetVersion(int*v){*v=env("STUB_DRIVER",12090);return 0;}
int cuDeviceGetCount(int*n){*n=env("STUB_COUNT",0);return 0;}
int cuGetErrorName(int e,const char**s){switch(e){case 0:*s="CUDA_SUCCESS";break;case 2:*s="CUDA_ERROR_OUT_OF_MEMORY";break;case 3:*s="CUDA_ERROR_NOT_INITIALIZED";break;case 34:*s="CUDA_ERROR_STUB_LIBRARY";break;case 46:*s="CUDA_ERROR_DEVICE_UNAVAILABLE";break;case 303:*s="CUDA_ERROR_SHARED_OBJECT_INIT_FAILED";break;case 304:*s="CUDA_ERROR_OPERATING_SYSTEM";break;case 100:*s="CUDA_ERROR_NO_DEVICE";break;case 101:*s="CUDA_ERROR_INVALID_DEVICE";break;case 803:*s="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";break;case 804:*s="CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE";break;case 802:*s="CUDA_ERROR_SYSTEM_NOT_READY";break;default:*s="CUDA_ERROR_UNKNOWN";}return 0;}
int cuGetErrorString(int e,const char**s){switch(e){case 100:*s="no CUDA-capable device is detected";break;case 803:*s="system has unsupported display driver / cuda driver combination";break;case 804:*s="forward compatibility was attempted on non supported HW";break;case 802:*s="system not yet initialized";break;default:*s="unknown error";}return 0;}

/* Fuzzes the kernels that unpack and dequantize, or with QTOOL_FUZZ=all every kernel: each input is
 * one task, run on every instruction set of the machine, which must agree bit for bit (NaN payloads
 * aside). `make fuzz-kernels` builds it with the sanitizers and runs it. */
#include "kernel_more_cases.h"

static int choices = READERS;

int LLVMFuzzerInitialize(int *count, char ***arguments)
{
    const char *asked = getenv("QTOOL_FUZZ");
    (void)count, (void)arguments;
    if (asked && !strcmp(asked, "all"))
        choices = CASES;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size)
        run_case(data[0] % choices, data + 1, size - 1);
    return 0;
}

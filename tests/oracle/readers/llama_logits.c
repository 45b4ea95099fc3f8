/* llama_logits MODEL OUT TOKENS...: float32 logits of every position, as llama.cpp computes them.
 *
 * TOKENS is one prompt, numbers with commas between them; OUT gets [prompts][positions][vocabulary].
 * Attention is exact unless the environment has FLASH_ATTENTION, without which some choose nothing.
 * Compiled against the headers of the llama.cpp that it runs with, so that no struct is guessed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama.h"

static void quiet(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level >= GGML_LOG_LEVEL_WARN) fputs(text, stderr);
}

int main(int argc, char **argv) {
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    struct llama_model *model = llama_model_load_from_file(argv[1], model_params);
    FILE *out = fopen(argv[2], "wb");
    if (model == NULL || out == NULL) return 1;
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int p = 3; p < argc; p++) {
        int count = 0;
        struct llama_batch batch = llama_batch_init(512, 0, 1);
        for (char *word = strtok(argv[p], ","); word != NULL; word = strtok(NULL, ",")) {
            batch.token[count] = atoi(word);
            batch.pos[count] = count;
            batch.n_seq_id[count] = 1;
            batch.seq_id[count][0] = 0;
            batch.logits[count++] = 1;
        }
        batch.n_tokens = count;
        struct llama_context_params params = llama_context_default_params();
        params.n_ctx = params.n_batch = params.n_ubatch = count > 64 ? 256 : 64;
        params.n_threads = params.n_threads_batch = 1;
        params.type_k = params.type_v = GGML_TYPE_F32;
        params.flash_attn_type = getenv("FLASH_ATTENTION") ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                                                           : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        struct llama_context *context = llama_init_from_model(model, params);
        if (context == NULL || llama_decode(context, batch) != 0) return 2;
        for (int i = 0; i < count; i++)
            fwrite(llama_get_logits_ith(context, i), sizeof(float), vocabulary, out);
        llama_free(context);
    }
    return fclose(out);
}

// Logits of all positions of a sequence by llama.cpp, f32 [tokens, vocabulary]: llamacpp_logits MODEL IDS OUT.
// IDS are separated by commas. Built against an installed llama.cpp: g++ -std=c++17 llamacpp_logits.cpp -lllama -lggml -lggml-base
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "llama.h"

int main(int argc, char** argv) {
    if (argc != 4) return fprintf(stderr, "usage: llamacpp_logits MODEL IDS OUT\n"), 2;
    llama_backend_init();
    llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return fprintf(stderr, "%s: cannot be loaded\n", argv[1]), 1;
    std::vector<llama_token> ids;
    for (char* id = strtok(argv[2], ","); id; id = strtok(nullptr, ",")) ids.push_back(atoi(id));
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = (unsigned)ids.size();
    llama_context* context = llama_init_from_model(model, params);
    llama_batch batch = llama_batch_init((int)ids.size(), 0, 1);
    batch.n_tokens = (int)ids.size();
    for (int i = 0; i < batch.n_tokens; i++) {
        batch.token[i] = ids[i], batch.pos[i] = i, batch.n_seq_id[i] = 1, batch.seq_id[i][0] = 0, batch.logits[i] = 1;
    }
    if (!context || llama_decode(context, batch)) return fprintf(stderr, "%s: cannot be computed\n", argv[1]), 1;
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE* out = fopen(argv[3], "wb");
    if (!out) return perror(argv[3]), 1;
    for (int i = 0; i < batch.n_tokens; i++) fwrite(llama_get_logits_ith(context, i), sizeof(float), vocabulary, out);
    return fclose(out) == 0 ? 0 : 1;
}

"""Vectors and scores of texts, by OpenAI's package and by hand."""

import base64
import json
import math
import struct
from pathlib import Path

import openai
import pytest
from conftest import Server
from openai import OpenAI

FIXTURES = Path(__file__).parents[1] / "fixtures/vectors"


@pytest.fixture(scope="module")
def embeddings():
    """A model of embeddings (last token, length 1), a cross-encoder, and one that generates."""
    models = [("embed", "qwen3_last"), ("rank", "xlm_roberta_score"), ("labels", "llama_labels")]
    flags = [flag for name, folder in models for flag in ("--model", f"{name}={FIXTURES / folder}")]
    with Server(*flags, "--model", "chat=demo", "--dtype", "f32") as server:
        yield server


@pytest.fixture(scope="module")
def vectors(embeddings):
    return OpenAI(base_url=f"{embeddings.url}/v1", api_key="none", max_retries=0, timeout=60)


def expected(folder):
    """Token ids of the fixture's texts, and what sentence-transformers gives for each in float64."""
    data = (FIXTURES / folder / "expected.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]

    def tensor(name):
        start, end = header[name]["data_offsets"]
        code = {"I32": "i", "F64": "d"}[header[name]["dtype"]]
        return list(struct.unpack(f"<{(end - start) // struct.calcsize(code)}{code}", body[start:end]))

    tokens, lengths, flat = tensor("tokens"), tensor("lengths"), tensor("f64")
    width, texts, at = len(flat) // len(lengths), [], 0
    for length in lengths:
        texts.append(tokens[at : at + length])
        at += length
    return texts, [flat[i * width : (i + 1) * width] for i in range(len(lengths))]


def close(a, b, most=1e-5):
    assert len(a) == len(b)
    assert math.dist(a, b) <= most * math.hypot(*b), math.dist(a, b)


def test_token_lists_have_the_peers_vectors(vectors):
    texts, exact = expected("qwen3_last")
    answer = vectors.embeddings.create(model="embed", input=texts, encoding_format="float")
    assert answer.object == "list" and answer.model == "embed"
    assert [e.index for e in answer.data] == list(range(len(texts)))
    assert all(e.object == "embedding" for e in answer.data)
    for found, row in zip(answer.data, exact):
        close(found.embedding, row)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, texts))
    one = vectors.embeddings.create(model="embed", input=texts[1])
    close(one.data[0].embedding, exact[1])


def test_texts_one_and_many(vectors):
    one = vectors.embeddings.create(model="embed", input="w5 w6 w7")
    many = vectors.embeddings.create(model="embed", input=["w5 w6 w7", "w9"])
    assert len(many.data) == 2
    close(many.data[0].embedding, one.data[0].embedding)
    # The tokenizer's own end of a text counts.
    ids = vectors.embeddings.create(model="embed", input=[5, 6, 7, 2])
    close(ids.data[0].embedding, one.data[0].embedding)
    assert one.usage.prompt_tokens == 4
    assert abs(math.hypot(*one.data[0].embedding) - 1) < 1e-5


def test_base64_is_the_same_numbers(embeddings):
    ask = lambda form: embeddings.json("/v1/embeddings", {"model": "embed", "input": "w5 w6", "encoding_format": form})
    packed = base64.b64decode(ask("base64")["data"][0]["embedding"])
    numbers = ask("float")["data"][0]["embedding"]
    assert list(struct.unpack(f"<{len(packed) // 4}f", packed)) == pytest.approx(numbers, abs=1e-7)


def test_fewer_dimensions(vectors):
    whole = vectors.embeddings.create(model="embed", input="w5 w6").data[0].embedding
    part = vectors.embeddings.create(model="embed", input="w5 w6", dimensions=8).data[0].embedding
    length = math.hypot(*whole[:8])
    close(part, [x / length for x in whole[:8]])
    for wrong in (0, len(whole) + 1):
        with pytest.raises(openai.UnprocessableEntityError) as error:
            vectors.embeddings.create(model="embed", input="w5", dimensions=wrong)
        assert error.value.param == "dimensions"


def test_a_large_batch_is_one_request(vectors):
    texts = [f"w{3 + i % 50} w{3 + i % 7}" for i in range(1000)]
    answer = vectors.embeddings.create(model="embed", input=texts)
    assert len(answer.data) == 1000
    close(answer.data[0].embedding, answer.data[350].embedding)
    with pytest.raises(openai.UnprocessableEntityError):
        vectors.embeddings.create(model="embed", input=["w3"] * 2049)


def test_what_a_model_is_not_for_is_refused(vectors, embeddings):
    with pytest.raises(openai.BadRequestError) as error:
        vectors.embeddings.create(model="chat", input="Hello")
    assert error.value.code == "model_not_supported" and "generates text" in str(error.value)
    with pytest.raises(openai.BadRequestError):
        vectors.embeddings.create(model="rank", input="Hello")
    with pytest.raises(openai.BadRequestError) as error:
        vectors.completions.create(model="embed", prompt="w5", max_tokens=2)
    assert error.value.param == "model" and "does not generate" in str(error.value)
    status, _, text = embeddings.get("/v1/rerank", {"model": "labels", "query": "w4", "documents": ["w5"]})
    assert status == 400 and "3 labels" in text


def test_bad_input(vectors):
    for wrong in ([], [[]]):
        with pytest.raises(openai.UnprocessableEntityError):
            vectors.embeddings.create(model="embed", input=wrong)
    with pytest.raises(openai.UnprocessableEntityError):
        vectors.embeddings.create(model="embed", input=[10**6])
    with pytest.raises(openai.BadRequestError) as error:
        vectors.embeddings.create(model="embed", input="w5 " * 5000)
    assert error.value.code == "context_length_exceeded"


def test_rerank(embeddings):
    texts = ["w5 w6", "w9 w10 w11", "w40", "w6"]
    ask = {"model": "rank", "query": "w5 w6", "documents": [texts[0], {"text": texts[1]}, *texts[2:]]}
    ranking = embeddings.json("/v1/rerank", ask)
    scores = [r["relevance_score"] for r in ranking["results"]]
    assert scores == sorted(scores, reverse=True) and all(0 < s < 1 for s in scores)
    assert sorted(r["index"] for r in ranking["results"]) == [0, 1, 2, 3]
    assert all(r["document"]["text"] == texts[r["index"]] for r in ranking["results"])
    # CLS, the question, SEP, the text, SEP.
    assert ranking["usage"]["total_tokens"] == sum(5 + len(t.split()) for t in texts)
    best = embeddings.json("/rerank", {**ask, "top_n": 2, "return_documents": False})["results"]
    assert [r["index"] for r in best] == [r["index"] for r in ranking["results"][:2]]
    assert all("document" not in r for r in best)
    pairs = embeddings.json("/score", {"model": "rank", "text_1": "w5 w6", "text_2": texts})["data"]
    by_index = {r["index"]: r["relevance_score"] for r in ranking["results"]}
    assert [p["score"] for p in pairs] == pytest.approx([by_index[i] for i in range(4)], rel=1e-6)


def test_scores_of_vectors_are_cosines(embeddings, vectors):
    texts = ["w5 w6", "w9 w10"]
    a, b = (vectors.embeddings.create(model="embed", input=t).data[0].embedding for t in texts)
    score = embeddings.json("/score", {"model": "embed", "text_1": texts[0], "text_2": texts[1]})["data"][0]["score"]
    assert score == pytest.approx(sum(x * y for x, y in zip(a, b)), abs=1e-6)
    both = embeddings.json("/score", {"model": "embed", "text_1": texts, "text_2": texts})["data"]
    assert [p["score"] for p in both] == pytest.approx([1, 1])
    assert embeddings.get("/score", {"model": "embed", "text_1": texts, "text_2": ["w5"] * 3})[0] == 422


def test_a_long_text_is_computed_whole_or_refused(embeddings):
    """An encoder has learned positions for 97 tokens; no step cuts a text."""
    ask = lambda n: embeddings.get("/score", {"model": "rank", "text_1": "w5 " * n, "text_2": "w6"})
    assert ask(93)[0] == 200
    status, _, text = ask(94)
    assert status == 400 and json.loads(text)["error"]["code"] == "context_length_exceeded"

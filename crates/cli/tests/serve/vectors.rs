//! Models that give vectors and scores in place of text.

use serde_json::{Value, json};

use super::support::*;

const EMBED: &str = "/v1/embeddings";

/// A model of vectors, a cross-encoder, and one that generates.
fn server() -> Server {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vectors");
    let embed = format!("embed={folder}/qwen2_mean");
    let rank = format!("rank={folder}/bert_pairs");
    Server::start(&[
        "--model",
        &embed,
        "--model",
        &rank,
        "--model",
        "chat=demo",
        "--dtype",
        "f32",
        "--chunk",
        "4",
    ])
}

fn vectors(answer: &Value) -> Vec<Vec<f64>> {
    let data = answer["data"].as_array().expect("a list");
    let numbers = |e: &Value| {
        e["embedding"].as_array().expect("numbers").iter().filter_map(Value::as_f64).collect()
    };
    data.iter().map(numbers).collect()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn vectors_and_scores_are_served_beside_texts() {
    let server = server();
    // Longer than a chunk, so that the mean is taken over several steps; and beside others, or alone.
    let texts = ["w5 w6 w7 w8 w9 w10 w11 w12 w13", "w40", "w5 w6"];
    let all = server.post(EMBED, &json!({"model": "embed", "input": texts})).ok();
    assert_eq!((&all["object"], &all["data"][1]["index"]), (&json!("list"), &json!(1)));
    assert_eq!(all["usage"], json!({"prompt_tokens": 15, "total_tokens": 15}));
    let all = vectors(&all);
    for (text, row) in texts.iter().zip(&all) {
        let one = vectors(&server.post(EMBED, &json!({"model": "embed", "input": text})).ok());
        assert!(distance(&one[0], row) < 1e-5, "{text}");
    }
    assert!((distance(&all[0], &vec![0.0; all[0].len()]) - 1.0).abs() < 1e-5, "its length");
    let few = server.post(EMBED, &json!({"model": "embed", "input": texts, "dimensions": 5})).ok();
    assert!(vectors(&few).iter().all(|v| v.len() == 5));

    // A pair's texts are told apart: they cannot change places.
    let score = |a: &str, b: &str| {
        let ask = json!({"model": "rank", "text_1": a, "text_2": b});
        server.post("/score", &ask).ok()["data"][0]["score"].as_f64().expect("a number")
    };
    let (there, back) = (score("w5 w6", "w9"), score("w9", "w5 w6"));
    assert!((there - back).abs() > 1e-6 && (0.0..=1.0).contains(&there), "{there} {back}");
    let ask = json!({"model": "rank", "query": "w5 w6", "documents": ["w9", {"text": "w30 w31"}], "top_n": 1});
    for path in ["/v1/rerank", "/rerank"] {
        let best = server.post(path, &ask).ok();
        let best = best["results"].as_array().expect("a list");
        let other = score("w5 w6", "w30 w31");
        let expected = if there >= other { (0, there) } else { (1, other) };
        assert_eq!((best.len(), &best[0]["index"]), (1, &json!(expected.0)));
        let found = best[0]["relevance_score"].as_f64().expect("a number");
        assert!((found - expected.1).abs() < 1e-6, "{found}");
    }
}

#[test]
fn what_a_model_is_not_for_is_refused() {
    let server = server();
    let unfit = Some("model_not_supported");
    for (path, ask) in [
        (EMBED, json!({"model": "chat", "input": "x"})),
        (EMBED, json!({"model": "rank", "input": "x"})),
        ("/score", json!({"model": "chat", "text_1": "x", "text_2": "y"})),
        ("/v1/rerank", json!({"model": "chat", "query": "x", "documents": ["y"]})),
    ] {
        server.post(path, &ask).error(400, Some("model"), unfit);
    }
    server.post(TEXT, &json!({"model": "embed", "prompt": "w5"})).error(400, Some("model"), None);
    let long = "w5 ".repeat(5000);
    for (path, ask, param) in [
        (EMBED, json!({"model": "embed", "input": [long]}), "input"),
        ("/v1/rerank", json!({"model": "rank", "query": "w5", "documents": [long]}), "documents"),
    ] {
        server.post(path, &ask).error(400, Some(param), Some("context_length_exceeded"));
    }
    let invalid = Some("invalid_value");
    for (ask, param) in [
        (json!({"model": "embed", "input": []}), "input"),
        (json!({"model": "embed", "input": [[]]}), "input"),
        (json!({"model": "embed", "input": [99_999]}), "input"),
        (json!({"model": "embed", "input": vec!["w5"; 2049]}), "input"),
        (json!({"model": "embed", "input": "w5", "dimensions": 0}), "dimensions"),
        (json!({"model": "embed", "input": "w5", "dimensions": 1000}), "dimensions"),
    ] {
        server.post(EMBED, &ask).error(422, Some(param), invalid);
    }
    let ask = json!({"model": "rank", "text_1": ["w5", "w6"], "text_2": ["w5", "w6", "w7"]});
    server.post("/score", &ask).error(422, Some("text_1"), invalid);
    server.post("/score", &json!({"model": "rank", "text_1": "w5"})).error(
        400,
        Some("text_2"),
        None,
    );
}

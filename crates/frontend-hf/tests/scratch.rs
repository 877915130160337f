use infernum_frontend_hf::{lower::*, spec::*};
use infernum_ir::{expr::Value, *};
fn val(v: &serde_json::Value) -> Value {
    match v {
        serde_json::Value::Null => Value::Null,
        serde_json::Value::Bool(b) => Value::Bool(*b),
        serde_json::Value::Number(n) => Value::Num(n.as_f64().unwrap()),
        serde_json::Value::String(s) => Value::Str(s.clone()),
        serde_json::Value::Array(a) => Value::List(a.iter().map(val).collect()),
        serde_json::Value::Object(o) => {
            Value::Map(o.iter().map(|(k, v)| (k.clone(), val(v))).collect())
        }
    }
}
#[test]
fn all() {
    let lib = Library::default();
    for fam in ["llama", "mistral", "qwen2", "qwen3"] {
        let src = lib.file(&format!("{fam}.ron")).unwrap();
        let dir = format!("{}/../../tests/fixtures/{fam}", env!("CARGO_MANIFEST_DIR"));
        for e in std::fs::read_dir(dir).unwrap() {
            let p = e.unwrap().path();
            let cfg: serde_json::Value =
                serde_json::from_str(&std::fs::read_to_string(p.join("config.json")).unwrap())
                    .unwrap();
            let o = cfg.as_object().unwrap();
            let keys: Vec<&str> = o.keys().map(|s| s.as_str()).collect();
            let r = lower(
                &src,
                &lib,
                &Request {
                    config: &|k| o.get(k).map(val).filter(|v| *v != Value::Null),
                    config_keys: &keys,
                    dtype: DType::Bf16,
                    max_length: 64,
                    weight_dtype: &|_| None,
                    rows: Sym::B,
                },
            );
            match r {
                Err(e) => panic!("{} {e}", p.display()),
                Ok(l) => {
                    if let Err(e) = verify(&l.module) {
                        panic!("{e}")
                    }
                    let t = text::print(&l.module);
                    let back = text::parse(&t, "x").unwrap_or_else(|e| panic!("{t}\n{e}"));
                    assert_eq!(back, l.module);
                    if p.ends_with("yarn_long") {
                        println!("{t}");
                    }
                }
            }
        }
    }
}

//! What a checkpoint of sentence-transformers does with a model's hidden states: `modules.json`, and a folder with a
//! `config.json` for each module that has settings.

use serde_json::{Map, Value};

use crate::config::{ConfigError, brief};
use crate::source::ModelFiles;

const MODULES: &str = "modules.json";
/// Settings of the module that is the model itself, which lie in the top folder.
const TRANSFORMER: &str = "sentence_bert_config.json";
/// Modules that specs can express.
const KINDS: [&str; 3] = ["Transformer", "Pooling", "Normalize"];

/// The settings of each module, by the last part of its type: `{"Transformer": {..}, "Pooling": {..}}`; `None`
/// where there is no `modules.json`.
pub(crate) fn read(files: &ModelFiles) -> Result<Option<Map<String, Value>>, ConfigError> {
    let Some(json) = files.read(MODULES)? else { return Ok(None) };
    let listed = parse(MODULES, &json)?;
    let fault = |expected: &'static str, found: &Value| ConfigError::Type {
        file: MODULES.to_owned(),
        key: "modules".to_owned(),
        expected,
        found: brief(found),
    };
    let list = listed.as_array().ok_or_else(|| fault("a list of modules", &listed))?;
    let mut modules = Map::new();
    for module in list {
        let text = |key| module.get(key).and_then(Value::as_str);
        let (Some(kind), Some(path)) = (text("type"), text("path")) else {
            return Err(fault("modules with a `type` and a `path`", module));
        };
        let kind = kind.rsplit('.').next().unwrap_or(kind);
        if !KINDS.contains(&kind) || modules.contains_key(kind) {
            let kind = crate::safetensors::shown(kind);
            return Err(ConfigError::Module { kind, known: KINDS.join(", ") });
        }
        let (file, json) = if path.is_empty() {
            (TRANSFORMER.to_owned(), files.read(TRANSFORMER)?)
        } else {
            (format!("{path}/config.json"), files.read_in(path, "config.json")?)
        };
        let settings = match json {
            None => Map::new(),
            Some(json) => match parse(&file, &json)? {
                Value::Object(settings) => settings,
                other => return Err(ConfigError::NotAnObject { file, found: brief(&other) }),
            },
        };
        modules.insert(kind.to_owned(), Value::Object(settings));
    }
    Ok(Some(modules))
}

fn parse(file: &str, json: &[u8]) -> Result<Value, ConfigError> {
    serde_json::from_slice(json).map_err(|error| ConfigError::Json { file: file.to_owned(), error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// A folder of an embedding model with this `modules.json`.
    fn folder(modules: &str) -> (tempfile::TempDir, ModelFiles) {
        let dir = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| std::fs::write(dir.path().join(file), text).unwrap();
        std::fs::create_dir(dir.path().join("1_Pooling")).unwrap();
        write("config.json", r#"{"architectures": ["Qwen3ForCausalLM"]}"#);
        write(MODULES, modules);
        write(TRANSFORMER, r#"{"max_seq_length": 512}"#);
        write("1_Pooling/config.json", r#"{"pooling_mode_lasttoken": true}"#);
        let files = ModelFiles::folder(dir.path()).unwrap();
        (dir, files)
    }

    const TYPICAL: &str = r#"[{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]"#;

    #[test]
    fn modules_are_keys_of_the_config() {
        let (_dir, files) = folder(TYPICAL);
        let config = Config::open(&files).unwrap();
        assert_eq!(config.u64("modules.Transformer.max_seq_length").unwrap(), Some(512));
        assert_eq!(config.bool("modules.Pooling.pooling_mode_lasttoken").unwrap(), Some(true));
        assert!(config.get("modules.Normalize").is_some());
        assert!(config.get("modules.Dense").is_none());
    }

    #[test]
    fn what_cannot_be_followed_is_an_error() {
        for (modules, expected) in [
            ("{}", "`modules`: expected a list of modules, found an object"),
            ("[{}]", "expected modules with a `type` and a `path`"),
            (r#"[{"path": "2_Dense", "type": "a.Dense"}]"#, "module `Dense`"),
            (r#"[{"path": "../..", "type": "a.Pooling"}]"#, "not a plain file name"),
            ("[", "modules.json: EOF"),
        ] {
            let (_dir, files) = folder(modules);
            let error = Config::open(&files).unwrap_err().to_string();
            assert!(error.contains(expected), "{modules}: {error}");
        }
    }
}

//! Fields that hold a text to a grammar, as OpenAI and vLLM spell them.

use infernum::{Grammar, GrammarError};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::{ApiError, quoted};
use crate::model::Served;

/// What the answer is held to.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponseFormat {
    r#type: FormatType,
    /// With `json_schema`.
    json_schema: Option<JsonSchema>,
}

/// `text` for any text, `json_object` for any JSON object.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum FormatType {
    Text,
    JsonObject,
    JsonSchema,
}

/// A schema, by a name.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct JsonSchema {
    /// Accepted for clients that send it.
    #[allow(dead_code, reason = "the schema says all")]
    name: Option<String>,
    /// Accepted for clients that send it.
    #[allow(dead_code, reason = "the schema says all")]
    description: Option<String>,
    /// Any object where it is left out.
    #[schema(value_type = Option<Object>)]
    schema: Option<Value>,
    /// Without effect: texts are held to schemas in either case.
    #[allow(dead_code, reason = "texts are held to schemas in either case")]
    strict: Option<bool>,
}

/// What the text is held to, as vLLM has it: one of these.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct StructuredOutputs {
    /// A JSON schema, as an object or as text.
    #[schema(value_type = Option<Schema>)]
    json: Option<Value>,
    /// A regular expression that all of the text matches.
    regex: Option<String>,
    /// Texts to choose among.
    choice: Option<Vec<String>>,
    /// A grammar in Lark's notation, or in GBNF.
    grammar: Option<String>,
    /// Any JSON object.
    json_object: Option<bool>,
}

/// A JSON schema, as an object or as text.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "for the API's description")]
pub(crate) enum Schema {
    Object(serde_json::Map<String, Value>),
    Text(String),
}

/// A grammar, and the field that asks for it.
pub(crate) type Asked = (&'static str, Grammar);

impl ResponseFormat {
    /// Any JSON object.
    pub(crate) fn json_object() -> ResponseFormat {
        ResponseFormat { r#type: FormatType::JsonObject, json_schema: None }
    }

    /// What a schema describes.
    pub(crate) fn json_schema(schema: Value) -> ResponseFormat {
        let schema =
            JsonSchema { name: None, description: None, schema: Some(schema), strict: None };
        ResponseFormat { r#type: FormatType::JsonSchema, json_schema: Some(schema) }
    }

    fn grammar(&self) -> Result<Option<Asked>, ApiError> {
        const NAME: &str = "response_format";
        Ok(match (&self.r#type, &self.json_schema) {
            (FormatType::Text, _) => None,
            (FormatType::JsonObject, _) => Some((NAME, Grammar::JsonObject)),
            (FormatType::JsonSchema, None) => {
                let message = "response_format: `json_schema` is missing";
                return Err(ApiError::malformed(message).param("response_format.json_schema"));
            }
            (FormatType::JsonSchema, Some(JsonSchema { schema: None, .. })) => {
                Some((NAME, Grammar::JsonObject))
            }
            (FormatType::JsonSchema, Some(JsonSchema { schema: Some(schema), .. })) => {
                Some((NAME, Grammar::JsonSchema(schema.clone())))
            }
        })
    }
}

impl StructuredOutputs {
    fn grammars(&self, name: fn(&str) -> &'static str) -> Result<Vec<Asked>, ApiError> {
        let mut all = Vec::new();
        if let Some(schema) = self.json.as_ref().filter(|v| !v.is_null()) {
            all.push((name("json"), Grammar::JsonSchema(read_schema(name("json"), schema)?)));
        }
        all.extend(self.regex.clone().map(|regex| (name("regex"), Grammar::Regex(regex))));
        all.extend(self.choice.clone().map(|texts| (name("choice"), Grammar::Choice(texts))));
        all.extend(self.grammar.clone().map(|text| (name("grammar"), Grammar::Lark(text))));
        let object = self.json_object == Some(true);
        all.extend(object.then(|| (name("json_object"), Grammar::JsonObject)));
        Ok(all)
    }
}

/// A schema that may be written as text.
fn read_schema(name: &str, schema: &Value) -> Result<Value, ApiError> {
    let Value::String(text) = schema else { return Ok(schema.clone()) };
    serde_json::from_str(text).map_err(|error| {
        ApiError::malformed(format!("{name}: is no JSON schema: {error}")).param(name)
    })
}

/// What a request asks its texts to be held to; at most one of all that can say so.
pub(crate) fn grammar(
    format: Option<&ResponseFormat>,
    guided: &StructuredOutputs,
    structured: Option<&StructuredOutputs>,
) -> Result<Option<Asked>, ApiError> {
    let mut all: Vec<Asked> = Vec::new();
    all.extend(format.map(ResponseFormat::grammar).transpose()?.flatten());
    all.extend(guided.grammars(|field| match field {
        "json" => "guided_json",
        "regex" => "guided_regex",
        "choice" => "guided_choice",
        "grammar" => "guided_grammar",
        _ => "guided_json_object",
    })?);
    if let Some(structured) = structured {
        all.extend(structured.grammars(|_| "structured_outputs")?);
    }
    if let [(first, _), (second, _), ..] = &all[..] {
        let message =
            format!("{second}: a text is held to one grammar, and `{first}` says one, too");
        return Err(ApiError::malformed(message).param(*second));
    }
    Ok(all.pop())
}

/// The guided fields as one.
pub(crate) fn guided(
    json: Option<&Value>,
    regex: Option<&String>,
    choice: Option<&Vec<String>>,
    grammar: Option<&String>,
    json_object: Option<bool>,
) -> StructuredOutputs {
    StructuredOutputs {
        json: json.cloned(),
        regex: regex.cloned(),
        choice: choice.cloned(),
        grammar: grammar.cloned(),
        json_object,
    }
}

/// A grammar, ready for the engine. To be called off the runtime: it may take seconds.
pub(crate) fn compile(
    served: &Served,
    (param, grammar): &Asked,
) -> Result<std::sync::Arc<dyn infernum_runtime::Constraint>, ApiError> {
    served.frontend.grammars().compile(grammar).map_err(|error| match error {
        GrammarError::Tokenizer(_) => ApiError::unsupported(param, format!("{param}: {error}")),
        GrammarError::Refused(_) | GrammarError::TooSlow => {
            ApiError::malformed(format!("{param}: {}", quoted(&error.to_string())))
                .param(*param)
                .because("invalid_grammar")
        }
    })
}

//! The API's description, from the types that read and write it.

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::api;

/// The OpenAPI document.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Infernum",
        description = "OpenAI-compatible API of `infernum serve`. Unknown fields of requests are \
                       ignored and named in the header x-infernum-warning.",
    ),
    paths(
        api::chat::create,
        api::completions::create,
        api::models::list,
        api::models::one,
        api::tokens::tokenize,
        api::tokens::detokenize,
        api::system::health,
        api::system::version,
        api::system::metrics,
    ),
    modifiers(&Key),
    security((), ("key" = [])),
)]
pub(crate) struct Api;

struct Key;

impl Modify for Key {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let bearer = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("One of the server's --api-key, where it has any"))
            .build();
        let components = api.components.get_or_insert_with(Default::default);
        components.add_security_scheme("key", SecurityScheme::Http(bearer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_resolves() {
        let document = serde_json::to_value(Api::openapi()).expect("JSON");
        let mut open = vec![&document];
        let mut references = 0;
        while let Some(value) = open.pop() {
            if let Some(reference) = value.get("$ref").and_then(|r| r.as_str()) {
                references += 1;
                let pointer = reference.strip_prefix('#').expect("within the document");
                assert!(document.pointer(pointer).is_some(), "{reference}");
            }
            open.extend(value.as_object().into_iter().flat_map(|o| o.values()));
            open.extend(value.as_array().into_iter().flatten());
        }
        assert!(references > 10);
        let request = &document["paths"]["/v1/chat/completions"]["post"]["requestBody"];
        assert_eq!(request["required"], true);
    }
}

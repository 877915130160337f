//! Routes: the router and the API's description, both made of what [`api::all`] lists.

use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::routing::{MethodFilter, MethodRouter};
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::{Modify, OpenApi};

use super::api;
use super::app::App;
use super::auth::API_KEY;

/// One route.
pub(crate) struct Route {
    /// An OpenAPI document of its own, in which its path stands as the router reads it: `{*name}` takes slashes,
    /// too.
    pub(crate) document: utoipa::openapi::OpenApi,
    /// Its handler, for the methods that the document has.
    pub(crate) handler: fn(MethodFilter) -> MethodRouter<Arc<App>>,
}

/// Defines a list of routes, from handlers that have a `#[utoipa::path]`.
macro_rules! routes {
    ($(#[$about:meta])* $name:ident: $($module:ident::$handler:ident),+ $(,)?) => {
        $(#[$about])*
        pub(crate) fn $name() -> Vec<crate::routes::Route> {
            vec![$({
                #[derive(utoipa::OpenApi)]
                #[openapi(paths($module::$handler))]
                struct Described;
                crate::routes::Route {
                    document: <Described as utoipa::OpenApi>::openapi(),
                    handler: |methods| axum::routing::on(methods, $module::$handler),
                }
            }),+]
        }
    };
}
pub(crate) use routes;

impl Route {
    /// Its path, and its operation by method: one, as `#[utoipa::path]` has it.
    fn operations(&self) -> impl Iterator<Item = (&String, MethodFilter, &Operation)> {
        self.document.paths.paths.iter().flat_map(|(path, item)| {
            let methods = [
                (MethodFilter::GET, &item.get),
                (MethodFilter::PUT, &item.put),
                (MethodFilter::POST, &item.post),
                (MethodFilter::PATCH, &item.patch),
                (MethodFilter::DELETE, &item.delete),
            ];
            methods
                .into_iter()
                .filter_map(move |(method, operation)| Some((path, method, operation.as_ref()?)))
        })
    }
}

/// A router of these routes.
pub(crate) fn router(routes: Vec<Route>) -> Router<Arc<App>> {
    let mut router = Router::new();
    for route in routes {
        for (path, method, _) in route.operations() {
            router = router.route(path, (route.handler)(method));
        }
    }
    router
}

/// Whether everybody may ask for a path, by whatever name, on a full server, too: how the server is.
pub(crate) fn is_open(path: &str) -> bool {
    static OPEN: LazyLock<Vec<String>> = LazyLock::new(|| {
        let routes = api::all();
        let open = |operation: &Operation| {
            operation.security.as_deref() == Some(&[SecurityRequirement::default()])
        };
        let all = routes.iter().flat_map(Route::operations);
        all.filter(|(.., operation)| open(operation)).map(|(path, ..)| path.clone()).collect()
    });
    OPEN.iter().any(|open| open == path)
}

/// The paths of all routes that take a body.
pub(crate) fn taking_bodies() -> Vec<String> {
    let routes = api::all();
    let all = routes.iter().flat_map(Route::operations);
    let taking = all.filter(|(.., operation)| operation.request_body.is_some());
    taking.map(|(path, ..)| path.clone()).collect()
}

/// The OpenAPI document.
pub(crate) fn document() -> utoipa::openapi::OpenApi {
    let mut all = Api::openapi();
    for mut route in api::all() {
        let paths = std::mem::take(&mut route.document.paths.paths);
        // OpenAPI does not tell parameters that take slashes from others.
        let plain = paths.into_iter().map(|(path, item)| (path.replace("{*", "{"), item));
        route.document.paths.paths = plain.collect();
        all.merge(route.document);
    }
    all
}

/// What of the document is no route's.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Infernum",
        description = "The APIs of `infernum serve`: OpenAI's, Anthropic's and Ollama's. Unknown fields of requests are \
                       ignored and named in the header x-infernum-warning.",
    ),
    modifiers(&Key),
    security((), ("key" = []), ("x-api-key" = [])),
)]
struct Api;

struct Key;

impl Modify for Key {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let bearer = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("One of the server's --api-key, where it has any"))
            .build();
        let components = api.components.get_or_insert_with(Default::default);
        components.add_security_scheme("key", SecurityScheme::Http(bearer));
        let header = ApiKey::Header(ApiKeyValue::with_description(
            API_KEY,
            "The same, in a header of its own",
        ));
        components.add_security_scheme(API_KEY, SecurityScheme::ApiKey(header));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::body::Body;
    use axum::http::{HeaderName, Request, StatusCode, header};
    use tower::ServiceExt;

    use super::*;
    use crate::metrics::Metrics;
    use crate::model::Entry;

    #[test]
    fn the_document_resolves() {
        let document = serde_json::to_value(document()).expect("JSON");
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
        assert!(document["paths"]["/v1/models/{model}"]["get"].is_object());
        assert!(document["components"]["securitySchemes"]["key"].is_object());
    }

    /// Router, keys, refusals of methods, metrics and documentation are of one list.
    #[tokio::test]
    async fn every_route_is_served_guarded_counted_and_described() {
        let args = crate::Args::given(&["--api-key", "k"]).expect("options");
        let metrics = Metrics::new("infernum").expect("buckets");
        let app = Arc::new(App::new(&args, vec![Entry::new("m")], metrics).expect("an app"));
        let router = crate::app::router(&app);
        let send = async |method: &str, path: &str, headers: &[(HeaderName, &str)]| {
            let path = path.replace("{*model}", "m").replace("{id}", "x");
            let request = Request::builder().method(method).uri(path);
            let request =
                headers.iter().fold(request, |request, (name, value)| request.header(name, *value));
            let request = request.body(Body::from("{}")).expect("a request");
            router.clone().oneshot(request).await.expect("an answer").status()
        };
        let json = (header::CONTENT_TYPE, "application/json");
        let ask = async |method: &str, path: &str, key: &str| {
            let key = format!("Bearer {key}");
            send(method, path, &[json.clone(), (header::AUTHORIZATION, &key)]).await
        };
        let routes = api::all();
        let mut names = BTreeSet::new();
        for route in &routes {
            let all: Vec<_> = route.operations().collect();
            let [(path, method, operation)] = all[..] else {
                panic!("one operation, {}", all.len())
            };
            let (method, other) = match method {
                MethodFilter::GET => ("GET", "PUT"),
                MethodFilter::DELETE => ("DELETE", "PUT"),
                _ => ("POST", "PUT"),
            };
            assert_eq!(ask(other, path, "k").await, StatusCode::METHOD_NOT_ALLOWED, "{path}");
            let keyless = ask(method, path, "wrong").await;
            assert_eq!(keyless != StatusCode::UNAUTHORIZED, is_open(path), "{path}: {keyless}");
            let bare = (HeaderName::from_static(API_KEY), "k");
            let page = (header::ORIGIN, "https://evil.example");
            let paged = send(method, path, &[json.clone(), bare.clone(), page]).await;
            assert_eq!(paged != StatusCode::FORBIDDEN, is_open(path), "{path}: {paged}");
            let plain =
                send(method, path, &[(header::CONTENT_TYPE, "text/plain"), bare.clone()]).await;
            let refused = plain == StatusCode::UNSUPPORTED_MEDIA_TYPE;
            assert_eq!(refused, method == "POST", "{path}: {plain}");
            let status = ask(method, path, "k").await;
            assert_eq!(send(method, path, &[json.clone(), bare]).await, status, "{path}");
            let served = [200, 400, 404, 503].contains(&status.as_u16()); // the model is loading
            assert!(served, "{path}: {status}");
            let counted = format!(
                "http_requests_total{{handler=\"{path}\",method=\"{method}\",status=\"{}\"}}",
                status.as_u16()
            );
            assert!(app.metrics.render().contains(&counted), "{counted}");
            let name = operation.operation_id.as_ref().expect("an id");
            assert!(names.insert(name.clone()), "two operations are named {name}");
            let described = operation.summary.as_ref().or(operation.description.as_ref());
            assert!(described.is_some_and(|text| !text.is_empty()), "{path} has no description");
        }
        assert!(is_open("/health") && !is_open("/metrics") && !is_open("/nowhere"));
        assert_eq!(ask("GET", "/nowhere", "k").await, StatusCode::NOT_FOUND);
        let operations = |item: &utoipa::openapi::PathItem| {
            [&item.get, &item.post, &item.delete].into_iter().flatten().count()
        };
        assert_eq!(document().paths.paths.values().map(operations).sum::<usize>(), routes.len());
    }
}

//! What all requests share, and what every one passes through on its way to its route.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};
use tower_http::request_id::{
    MakeRequestId, PropagateRequestIdLayer, RequestId, SetRequestIdLayer,
};

use super::budget::{Budget, Held};
use super::error::{self, ApiError};
use super::exchange::next_data;
use super::lanes::{Client, Lanes};
use super::metrics::Metrics;
use super::model::{Entry, Served};
use super::tls::Tls;
use super::traces::Traces;
use super::{Args, api, auth, guard, limits, routes};
use api::responses::store::Store;

/// How long a client may take for the body of a request: at first, for each byte that comes, and in
/// all.
const BODY_START: Duration = Duration::from_secs(10);
const BODY_BYTE: Duration = Duration::from_micros(100);
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Of the largest bodies, how many there may be at once.
const BODIES: usize = 128;
/// Seconds after which to ask again for a model that is loading.
const LOADING: u64 = 5;

/// What all requests share.
pub(crate) struct App {
    /// More come where engines of other processes have them.
    models: RwLock<Arc<[Arc<Entry>]>>,
    pub(crate) metrics: Metrics,
    pub(crate) traces: Option<Arc<Traces>>,
    keys: RwLock<Arc<auth::Keys>>,
    pub(crate) tls: Option<Arc<Tls>>,
    pub(crate) guard: guard::Guard,
    pub(crate) lanes: Lanes,
    pub(crate) failure: Failure,
    pub(crate) max_body: usize,
    /// The API's description, and of how many models it tells.
    pub(crate) description: Mutex<Option<(usize, Bytes)>>,
    bodies: Arc<Budget>,
    pub(crate) request_timeout: Option<Duration>,
    /// Responses that clients may ask for again.
    pub(crate) responses: Store,
    cors: Option<CorsLayer>,
    draining: AtomicBool,
}

impl App {
    pub(crate) fn new(args: &Args, models: Vec<Entry>, metrics: Metrics) -> Result<App, String> {
        let keys = read_keys(args, &auth::Keys::default())?;
        let listen = &args.listen;
        let addresses = listen.addresses();
        let open = keys.is_empty();
        let guard = guard::Guard::new(&addresses, open, &listen.allowed_host, &listen.cors_origin);
        let tls = listen.tls_cert.as_ref().zip(listen.tls_key.as_ref());
        let tls = tls.map(|(certificates, key)| Tls::open(certificates, key)).transpose();
        let seconds = args.limits.request_timeout;
        let traces = Traces::start(&args.traces, metrics.traces_dropped());
        Ok(App {
            models: RwLock::new(models.into_iter().map(Arc::new).collect()),
            traces: traces.map_err(|e| e.to_string())?,
            metrics,
            keys: RwLock::new(Arc::new(keys)),
            tls: tls.map_err(|e| e.to_string())?.map(Arc::new),
            guard,
            lanes: Lanes::start().map_err(|e| format!("cannot start a thread: {e}"))?,
            failure: Failure::default(),
            max_body: args.limits.max_body_bytes,
            description: Mutex::default(),
            bodies: Budget::new(args.limits.max_body_bytes.saturating_mul(BODIES)),
            request_timeout: (seconds > 0).then(|| Duration::from_secs(seconds)),
            responses: Store::new(args.limits.max_responses, args.limits.max_response_bytes),
            cors: cors(&args.listen.cors_origin)?,
            draining: AtomicBool::new(false),
        })
    }

    /// The keys that requests may bring.
    pub(crate) fn keys(&self) -> Arc<auth::Keys> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads keys and certificates again. Where a file has a fault, what was read before stays.
    pub(crate) fn reload(&self, args: &Args) {
        match read_keys(args, &self.keys()) {
            Ok(keys) => {
                *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
                tracing::info!("keys were read again");
            }
            Err(error) => tracing::error!(error, "the keys stay as they were"),
        }
        match self.tls.as_ref().map(|tls| tls.reload()) {
            None => {}
            Some(Ok(())) => tracing::info!("certificates were read again"),
            Some(Err(error)) => tracing::error!(%error, "the certificates stay as they were"),
        }
    }

    /// The models, in the order in which they came.
    pub(crate) fn models(&self) -> Arc<[Arc<Entry>]> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A model by its own name.
    pub(crate) fn entry(&self, name: &str) -> Option<Arc<Entry>> {
        self.models().iter().find(|entry| entry.name == name).cloned()
    }

    /// A model with an adapter, by the adapter's name: the first model's that has one, where no model goes by that name.
    pub(crate) fn adapter(&self, name: &str) -> Option<Arc<Served>> {
        if self.entry(name).is_some() {
            return None;
        }
        self.models().iter().find_map(|entry| entry.adapter(name)).map(Arc::new)
    }

    /// A model with each of its adapters, in the order of their loading; without those whose names others go by.
    pub(crate) fn adapters(&self, entry: &Entry) -> Vec<Arc<Served>> {
        let found = entry.adapter_names().into_iter().filter_map(|name| self.adapter(&name));
        found.filter(|served| served.is_of(&entry.name)).collect()
    }

    /// Warns of adapters that are not served because others go by their names.
    pub(crate) fn warn_of_taken_names(&self) {
        for entry in self.models().iter() {
            for name in entry.adapter_names() {
                if !self.adapter(&name).is_some_and(|served| served.is_of(&entry.name)) {
                    tracing::warn!(
                        adapter = name,
                        of = entry.name,
                        "not served: another model, or adapter of another model, goes by its name"
                    );
                }
            }
        }
    }

    /// Serves one more model, which may come late to its place: names mean the same whichever engine was there first.
    pub(crate) fn add_model(&self, entry: Arc<Entry>) {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let at = models.partition_point(|model| model.rank <= entry.rank);
        let mut all = models.to_vec();
        all.insert(at, entry);
        *models = all.into();
    }

    /// Whether any model has requests under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.models().iter().filter_map(|m| m.served()).any(|model| model.worker.is_busy())
    }

    /// Takes no more work.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether new work is refused.
    pub(crate) fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// A model by name, which may be left out where there is but one.
    pub(crate) fn model(&self, name: Option<&str>) -> Result<Arc<Served>, ApiError> {
        let models = self.models();
        let known = || {
            let adapters = models.iter().flat_map(|m| self.adapters(m));
            let adapters = adapters.map(|served| format!("`{}`", served.name));
            let names = models.iter().map(|m| format!("`{}`", m.name)).chain(adapters);
            names.collect::<Vec<_>>().join(", ")
        };
        let entry = match (name, &models[..]) {
            (Some(name), all) => {
                let Some(entry) = all.iter().find(|m| m.name == name) else {
                    let adapted = self.adapter(name);
                    return adapted.ok_or_else(|| ApiError::unknown_model(name, &known()));
                };
                entry
            }
            (None, [one]) => one,
            (None, _) => {
                let message = format!("model: expected one of {}", known());
                return Err(ApiError::malformed(message).param("model"));
            }
        };
        entry.served().cloned().ok_or_else(|| {
            let message = format!("the model `{}` is loading", entry.name);
            ApiError::unavailable("model_loading", message, LOADING)
        })
    }

    /// As [`App::model`], for new work.
    pub(crate) fn model_for_work(&self, name: Option<&str>) -> Result<Arc<Served>, ApiError> {
        if self.draining() {
            let message = "the server is shutting down";
            return Err(ApiError::unavailable("shutting_down", message, LOADING));
        }
        self.model(name)
    }

    /// A request's body, and its share of the memory for bodies.
    pub(crate) async fn body(
        &self,
        client: Client,
        mut body: Body,
    ) -> Result<(Bytes, Held), ApiError> {
        let (mut bytes, mut held) = (Vec::new(), self.bodies.open(client));
        let start = tokio::time::Instant::now();
        loop {
            let received = BODY_BYTE.saturating_mul(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
            let limit = BODY_TIMEOUT.min(BODY_START + received);
            let next = tokio::time::timeout_at(start + limit, next_data(&mut body)).await;
            let next = next.map_err(|_| ApiError::timeout("the body took too long to arrive"))?;
            let Some(data) = next else { return Ok((bytes.into(), held)) };
            let data = data.map_err(|error| {
                ApiError::malformed(format!("the body could not be read: {error}"))
            })?;
            if bytes.len() + data.len() > self.max_body {
                return Err(ApiError::too_large("the body", self.max_body));
            }
            if !held.grow_to(bytes.len() + data.len()) {
                return Err(ApiError::too_many_bodies());
            }
            bytes.extend_from_slice(&data);
        }
    }
}

fn read_keys(args: &Args, before: &auth::Keys) -> Result<auth::Keys, String> {
    auth::Keys::read(&args.listen.api_key, args.listen.api_key_file.as_deref(), before)
}

/// Tells that an engine is gone for good.
#[derive(Default)]
pub(crate) struct Failure {
    model: OnceLock<String>,
    told: tokio::sync::Notify,
}

impl Failure {
    /// The engine of a model has failed.
    pub(crate) fn tell(&self, model: &str) {
        let _ = self.model.set(model.to_owned()); // the first one says enough
        self.told.notify_one();
    }

    /// Waits for the first engine to fail; gives the name of its model.
    pub(crate) async fn wait(&self) -> &str {
        loop {
            if let Some(model) = self.model.get() {
                return model;
            }
            self.told.notified().await;
        }
    }
}

/// All routes, with what stands before them.
pub(crate) fn router(app: &Arc<App>) -> Router {
    let routes = routes::router(api::all())
        .route_layer(from_fn(guard::json_only))
        .fallback(nothing)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app.clone())
        .layer(from_fn_with_state(app.clone(), auth::check))
        .layer(from_fn_with_state(app.clone(), guard::check));
    // Before keys are asked for: browsers ask what is allowed without them.
    let routes = match &app.cors {
        Some(cors) => routes.layer(cors.clone()),
        None => routes,
    };
    observed(app, routes)
}

/// What operators and their tools ask for, on an address of its own, where no key is asked for.
pub(crate) fn operation_router(app: &Arc<App>) -> Router {
    let routes = routes::router(api::operation())
        .fallback(nothing)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app.clone())
        .layer(from_fn_with_state(app.clone(), guard::check));
    observed(app, routes)
}

/// The same routes, noted and counted.
fn observed(app: &Arc<App>, routes: Router) -> Router {
    routes
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn(error::in_its_words))
        .layer(from_fn_with_state(app.clone(), trace))
        .layer(PropagateRequestIdLayer::new(REQUEST_ID))
        .layer(SetRequestIdLayer::new(REQUEST_ID, NewId))
}

async fn nothing(uri: Uri) -> ApiError {
    ApiError::not_found(uri.path())
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::method(method.as_str(), uri.path())
}

#[allow(clippy::needless_pass_by_value, reason = "the layer's signature")]
fn panicked(_: Box<dyn std::any::Any + Send>) -> Response {
    ApiError::internal("the server has a bug; its log says where").into_response()
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Names requests whose client did not.
#[derive(Clone, Copy)]
struct NewId;

impl MakeRequestId for NewId {
    fn make_request_id<B>(&mut self, _: &axum::http::Request<B>) -> Option<RequestId> {
        HeaderValue::from_str(&format!("req-{}", random_id())).ok().map(RequestId::new)
    }
}

/// 24 random characters.
pub(crate) fn random_id() -> String {
    (0..24).map(|_| fastrand::alphanumeric().to_ascii_lowercase()).collect()
}

/// The name of a request, shortened for logs.
pub(crate) fn request_id(extensions: &axum::http::Extensions) -> String {
    let id = extensions.get::<RequestId>().and_then(|id| id.header_value().to_str().ok());
    id.unwrap_or_default().chars().take(128).collect()
}

/// Notes and counts what was answered.
async fn trace(
    State(app): State<Arc<App>>,
    request: Request,
    next: axum::middleware::Next,
) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let route = request.extensions().get::<MatchedPath>().cloned();
    let id = request_id(request.extensions());
    let start = std::time::Instant::now();
    let response = match &app.traces {
        None => next.run(request).await,
        Some(traces) => {
            let headers = request.headers().clone();
            traces.follow(&headers, &path, next.run(request)).await
        }
    };
    let (status, ms) = (response.status().as_u16(), start.elapsed().as_micros() as f64 / 1e3);
    app.metrics.answered(&method, route.as_ref().map(MatchedPath::as_str), status);
    if let Some(error) = response.extensions().get::<ApiError>() {
        app.metrics.refused(error.kind());
    }
    if status >= 500 {
        tracing::warn!(request_id = id, %method, path, status, ms, "answered");
    } else {
        tracing::debug!(request_id = id, %method, path, status, ms, "answered");
    }
    response
}

/// Lets pages of these origins call; `None` where there are none.
fn cors(origins: &[String]) -> Result<Option<CorsLayer>, String> {
    if origins.is_empty() {
        return Ok(None);
    }
    let origin = if origins.iter().any(|o| o == "*") {
        AllowOrigin::from(Any)
    } else {
        let parse = |o: &String| {
            o.parse::<HeaderValue>().map_err(|_| format!("--cors-origin: `{o}` is no origin"))
        };
        AllowOrigin::list(origins.iter().map(parse).collect::<Result<Vec<_>, _>>()?)
    };
    let exposed = [REQUEST_ID, header::RETRY_AFTER, api::warnings::WARNING];
    let exposed: Vec<_> = exposed.into_iter().chain(limits::header_names()).collect();
    let layer = CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(exposed);
    Ok(Some(layer))
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use tower::ServiceExt;

    use super::*;

    async fn ask(app: &Arc<App>, path: &str, body: &'static str) -> Response {
        let method = if body.is_empty() { "GET" } else { "POST" };
        let request = axum::http::Request::builder().method(method).uri(path);
        let request = request.header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body)).expect("a request");
        router(app).oneshot(request).await.expect("an answer")
    }

    #[test]
    fn models_stand_as_their_engines_were_named_whichever_comes_first() {
        let args = Args::given(&[]).expect("options");
        let metrics = Metrics::new("infernum").expect("buckets");
        let entry = |(name, rank): (&str, usize)| Entry::new(name).ranked(rank);
        let app = App::new(&args, [("b", 1), ("c", 2)].map(entry).into(), metrics).expect("an app");
        for late in [("e", 4), ("a", 0), ("d", 3)] {
            app.add_model(Arc::new(entry(late)));
        }
        let models = app.models();
        let names: Vec<&str> = models.iter().map(|entry| &*entry.name).collect();
        assert_eq!(names, ["a", "b", "c", "d", "e"]);
    }

    #[tokio::test]
    async fn what_is_not_ready_says_when_to_come_back() {
        let args = Args::given(&[]).expect("options");
        let metrics = Metrics::new("infernum").expect("buckets");
        let app = App::new(&args, vec![Entry::new("m")], metrics).expect("an app");
        let app = Arc::new(app);
        let text = r#"{"model": "m", "prompt": "x", "messages": [], "tokens": [], "input": "x"}"#;
        let unavailable = async |path, body, code: &str| {
            let response = ask(&app, path, body).await;
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
            assert!(response.headers().contains_key(header::RETRY_AFTER), "{path}");
            let body = axum::body::to_bytes(response.into_body(), 4096).await.expect("a body");
            let body: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
            assert_eq!(body["error"]["code"], code, "{path}");
        };
        for path in
            ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/responses"]
        {
            unavailable(path, text, "model_loading").await;
        }
        for path in ["/health", "/v1/models", "/v1/models/m"] {
            unavailable(path, "", "model_loading").await;
        }
        unavailable("/readyz", "", "model_loading").await;
        for path in ["/", "/docs", "/openapi.json", "/version", "/metrics", "/livez"] {
            assert_eq!(ask(&app, path, "").await.status(), StatusCode::OK, "{path}");
        }
        app.drain();
        unavailable("/health", "", "shutting_down").await;
        unavailable("/readyz", "", "shutting_down").await;
        assert_eq!(ask(&app, "/livez", "").await.status(), StatusCode::OK);
        unavailable("/v1/completions", text, "shutting_down").await;
    }
}

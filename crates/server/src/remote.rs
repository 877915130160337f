//! Engines in other processes: which models they have, and how they are asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use infernum::{CompileOptions, Frontend, ModelOptions};
use infernum_link::client::{Dial, FrontEnd};
use infernum_link::{Address, LinkError, Offer, Refusal, Report};
use infernum_runtime::StepInputs;
use sha2::{Digest, Sha256};
use tokio::sync::OnceCell;

use super::Args;
use super::app::App;
use super::load::Spawn;
use super::maker::open_frontend;
use super::metrics::ModelMetrics;
use super::model::{Entry, NamedModel, Served};
use super::outbox::{Outbox, Shared, locked};
use super::status::Status;
use super::worker::{Line, Worker};

/// How often engines are looked for, and how often it is told that none was found.
const PAUSE: Duration = Duration::from_millis(200);
const TOLD: u32 = 50;

/// A model whose engines are elsewhere.
struct Model {
    name: String,
    /// Of its [`Entry`].
    rank: usize,
    frontend: Frontend,
    /// What the first engine offered that had it: others offer the same.
    offer: Offer,
}

/// The models of engines elsewhere, as far as they were there when they were asked first.
pub(crate) struct Remote {
    models: Vec<Model>,
    /// The engines that answered, with their models' places.
    found: Vec<(Dial, usize)>,
    /// Those that did not.
    missing: Vec<Dial>,
}

/// Options that a front end and its engine disagree about, or that make no sense.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RemoteError {
    #[error("--engine-secret {path}: {message}")]
    Secret { path: String, message: String },
    #[error(
        "the model of the engine at {address}: {source}; --model says where its files are here"
    )]
    Model { address: Address, source: Box<infernum::Error> },
    #[error("the engine at {address}: {message}")]
    Unsuitable { address: Address, message: String },
    #[error("the engine at {address}: {source}")]
    Link { address: Address, source: LinkError },
}

/// What a tokenizer, a chat template and defaults make of words: where two processes find the same, they mean the same by a
/// token.
pub(crate) fn digest(frontend: &Frontend) -> Result<String, infernum::Error> {
    let mut hasher = Sha256::new();
    let template = frontend.template().map_or("", |template| template.text());
    let tokenizer = frontend.tokenizer().json()?;
    for text in [&*tokenizer, template, &format!("{:?} {:?}", frontend.task(), frontend.defaults())]
    {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    }
    Ok(format!("{:x}", hasher.finalize()))
}

impl Remote {
    /// Waits for the first engine to answer, and opens the text sides of the models of all that do.
    pub(crate) async fn find(args: &Args) -> Result<Remote, Box<dyn std::error::Error>> {
        let (answers, missing) = first_offers(dials(args)?).await?;
        let mut remote = Remote { models: Vec::new(), found: Vec::new(), missing };
        for (dial, offer) in answers {
            let named = named(args, &offer);
            let known = remote.models.iter().position(|model| model.name == named.name);
            let place = known.unwrap_or(remote.models.len());
            if known.is_none() {
                remote.models.push(Model::open(&named, args, &dial.address, offer)?);
            }
            remote.found.push((dial, place));
        }
        Ok(remote)
    }

    /// Their models, in the order of their engines.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> {
        self.models.iter().map(|model| Entry::new(&model.name).ranked(model.rank))
    }

    /// Has the models served by their engines, as far as and as soon as they are there.
    pub(crate) fn serve(self, app: &Arc<App>, args: &Arc<Args>, spawn: Spawn<'_>) {
        let known = Arc::new(Known::default());
        let mut places = Vec::new();
        for model in self.models {
            let place = known.place(&model.name);
            let offered = Offered::of(app, args, model);
            // Their names differ, and nobody else knows of it yet.
            let _ = place.set(offered.clone());
            places.push(offered);
        }
        for (dial, place) in self.found {
            places[place].attach(dial, app, args, spawn);
        }
        for dial in self.missing {
            spawn(Box::pin(await_engine(dial, app.clone(), args.clone(), known.clone())));
        }
    }
}

impl Model {
    /// Opens the text side of what an engine offers, which must read and write texts as that does.
    fn open(
        named: &NamedModel,
        args: &Args,
        address: &Address,
        offer: Offer,
    ) -> Result<Model, RemoteError> {
        let (frontend, own) = open(named, &args.host.compile).map_err(|source| {
            RemoteError::Model { address: address.clone(), source: Box::new(source) }
        })?;
        let expected = Offer { digest: own, ..offer.clone() };
        suits(&expected, &offer)
            .map_err(|message| RemoteError::Unsuitable { address: address.clone(), message })?;
        let rank = args.engines.iter().position(|engine| engine == address).unwrap_or(0);
        Ok(Model { name: named.name.clone(), rank, frontend, offer })
    }
}

/// A model that is served, for engines that come to it.
#[derive(Clone)]
struct Offered {
    served: Arc<Served>,
    expected: Offer,
}

impl Offered {
    /// Serves a model, without engines yet.
    fn of(app: &App, args: &Args, model: Model) -> Offered {
        let Model { name, rank, frontend, offer } = model;
        let blocks = offer.facts.blocks;
        let metrics = Arc::new(app.metrics.model(&name, StepInputs::BLOCK_SIZE, blocks));
        let worker = Worker::new(Vec::new(), args.limits.unread());
        let served = Served::new(&name, frontend, offer.facts.clone(), worker, metrics);
        let (entry, is_new) = match app.entry(&name) {
            Some(entry) => (entry, false),
            None => (Arc::new(Entry::new(&name).ranked(rank)), true),
        };
        let served = entry.set(served);
        if is_new {
            app.add_model(entry);
        }
        Offered { served, expected: offer }
    }

    /// Has an engine asked for it, whenever it is there.
    fn attach(&self, dial: Dial, app: &Arc<App>, args: &Args, spawn: Spawn<'_>) {
        let (metrics, facts) = (self.served.metrics.clone(), &self.expected.facts);
        let status = Arc::new(Status::new(facts.sequences, args.limits.queue));
        let outbox: Shared = Arc::new(Mutex::new(Outbox::new(status.clone(), metrics.clone())));
        let name = dial.address.to_string();
        let here = Here {
            expected: self.expected.clone(),
            status: status.clone(),
            outbox: outbox.clone(),
            metrics,
            app: Arc::downgrade(app),
        };
        let (remote, follow) = dial.follow(here);
        spawn(Box::pin(follow));
        self.served.worker.add(Line::remote(name, Arc::new(remote), status, outbox));
    }
}

/// The models that engines were found to have, by name. Of engines with one model the first opens it, and others wait for that;
/// engines of other models do not.
#[derive(Default)]
struct Known(Mutex<HashMap<String, Arc<OnceCell<Offered>>>>);

impl Known {
    /// Where the model of that name is, or will be.
    fn place(&self, name: &str) -> Arc<OnceCell<Offered>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(name.to_owned()).or_default().clone()
    }
}

/// Waits for an engine that was not there at first, and has it asked for the model that it turns out to have.
async fn await_engine(dial: Dial, app: Arc<App>, args: Arc<Args>, known: Arc<Known>) {
    let mut said = String::new();
    loop {
        let error = match dial.offer().await {
            Err(error) => error.to_string(),
            Ok(offer) => match admit(&dial, offer, &app, &args, &known).await {
                Ok(()) => return,
                Err(error) => error.to_string(),
            },
        };
        if error != said {
            tracing::warn!(engine = %dial.address, error, "waiting for an engine");
            said = error;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn admit(
    dial: &Dial,
    offer: Offer,
    app: &Arc<App>,
    args: &Arc<Args>,
    known: &Known,
) -> Result<(), RemoteError> {
    let named = named(args, &offer);
    let name = named.name.clone();
    let place = known.place(&name);
    let opened = place.get_or_try_init(async || {
        let (address, own) = (dial.address.clone(), args.clone());
        let opened = move || Model::open(&named, &own, &address, offer);
        let opened = tokio::task::spawn_blocking(opened).await;
        let panicked = |_| RemoteError::Unsuitable {
            address: dial.address.clone(),
            message: "reading its model panicked".to_owned(),
        };
        let offered = Offered::of(app, args, opened.map_err(panicked)??);
        tracing::info!(model = name, engine = %dial.address, "ready");
        Ok(offered)
    });
    opened.await?.attach(dial.clone(), app, args, &|task| drop(tokio::spawn(task)));
    Ok(())
}

/// What the model that an engine offers is called here, and where its files are. One --model is that of all engines; of several
/// each is that of the engines that have its name.
fn named(args: &Args, offer: &Offer) -> NamedModel {
    let given = match &args.models[..] {
        [one] => Some(one),
        several => several.iter().find(|model| model.name == offer.name),
    };
    given.cloned().unwrap_or_else(|| NamedModel {
        name: offer.name.clone(),
        folder: offer.model.as_ref().map(Into::into),
    })
}

fn open(
    named: &NamedModel,
    compile: &CompileOptions,
) -> Result<(Frontend, String), infernum::Error> {
    let options = ModelOptions {
        model: named.folder.clone(),
        random_weights: true,
        encoding: None,
        compile: compile.clone(),
    };
    let frontend = open_frontend(named, &options.open_bare()?)?;
    let digest = digest(&frontend)?;
    Ok((frontend, digest))
}

fn dials(args: &Args) -> Result<Vec<Dial>, RemoteError> {
    let secret = args.link.secret()?;
    let silence = args.link.silence();
    let dial =
        |address: &Address| Dial { address: address.clone(), secret: secret.clone(), silence };
    Ok(args.engines.iter().map(dial).collect())
}

/// What those engines offer that answer, in the order of their addresses, and those that do not; it is waited for the first.
/// What only its operator can mend ends it.
async fn first_offers(dials: Vec<Dial>) -> Result<(Vec<(Dial, Offer)>, Vec<Dial>), RemoteError> {
    for tried in 0u32.. {
        let asked: Vec<_> = dials
            .iter()
            .cloned()
            .map(|dial| tokio::spawn(async move { dial.offer().await }))
            .collect();
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for (dial, asked) in dials.iter().zip(asked) {
            let address = || dial.address.clone();
            match asked.await.unwrap_or(Err(LinkError::Ended)) {
                Ok(offer) => found.push((dial.clone(), offer)),
                Err(source @ (LinkError::Open(_) | LinkError::NoSecret | LinkError::Secret)) => {
                    return Err(RemoteError::Link { address: address(), source });
                }
                Err(error) => {
                    if tried % TOLD == 0 {
                        tracing::info!(engine = %dial.address, %error, "waiting for an engine");
                    }
                    missing.push(dial.clone());
                }
            }
        }
        if !found.is_empty() {
            return Ok((found, missing));
        }
        tokio::time::sleep(PAUSE).await;
    }
    unreachable!("it is tried until somebody answers")
}

/// Whether what an engine offers is what is served here.
fn suits(expected: &Offer, found: &Offer) -> Result<(), String> {
    if found.digest != expected.digest {
        return Err(format!(
            "its model `{}` reads and writes texts in another way than `{}` here: expected the same tokenizer, chat template \
             and defaults; --model says where the same files are",
            found.name, expected.name
        ));
    }
    let (own, other) = (&expected.facts, &found.facts);
    if (own.vocab, own.width) != (other.vocab, other.width) {
        return Err(format!(
            "expected a vocabulary of {} and rows of {}, found {} and {}",
            own.vocab, own.width, other.vocab, other.width
        ));
    }
    if other.max_length < own.max_length {
        return Err(format!(
            "expected sequences of {} tokens at least, as other engines here have them, found {}: start all with one \
             --max-length and cache",
            own.max_length, other.max_length
        ));
    }
    Ok(())
}

/// What an engine says, on its way to those who asked.
struct Here {
    expected: Offer,
    status: Arc<Status>,
    outbox: Shared,
    metrics: Arc<ModelMetrics>,
    app: Weak<App>,
}

impl FrontEnd for Here {
    fn offered(&mut self, offer: &Offer) -> Result<(), String> {
        suits(&self.expected, offer)?;
        self.status.arrived(offer.instance, &offer.facts);
        Ok(())
    }

    fn reported(&mut self, report: Report) {
        let has_told = report.adapters.is_some();
        locked(&self.outbox).report(report);
        if let Some(app) = self.app.upgrade().filter(|_| has_told) {
            app.warn_of_taken_names();
        }
    }

    fn unsent(&mut self, key: u64, refusal: Option<Refusal>) {
        locked(&self.outbox).unsent(key, refusal);
    }

    fn lost(&mut self) {
        self.status.lost();
        locked(&self.outbox).lost();
    }

    fn malformed(&mut self) {
        self.metrics.malformed_here();
    }
}

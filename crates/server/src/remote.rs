//! Engines in other processes: which model they have, and how they are asked.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use infernum::{CompileOptions, Frontend, ModelOptions};
use infernum_link::client::{Dial, FrontEnd};
use infernum_link::{Address, Link, LinkError, Offer, Refusal, Report};
use infernum_runtime::StepInputs;
use sha2::{Digest, Sha256};

use super::Args;
use super::app::App;
use super::load::Spawn;
use super::maker::open_frontend;
use super::metrics::ModelMetrics;
use super::model::{NamedModel, Served};
use super::outbox::{Outbox, Shared, locked};
use super::status::Status;
use super::worker::{Line, Worker};

/// How often engines are looked for, and how often it is told that none was found.
const PAUSE: Duration = Duration::from_millis(200);
const TOLD: u32 = 50;

/// A model whose engines are elsewhere.
pub(crate) struct Remote {
    pub(crate) name: String,
    frontend: Frontend,
    offer: Offer,
}

/// Options that a front end and its engine disagree about, or that make no sense.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RemoteError {
    #[error("--engine-secret {path}: {message}")]
    Secret { path: String, message: String },
    #[error("a front end of engines serves one model: expected --model once at most, found {0}")]
    Models(usize),
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
    /// Waits for the first engine to answer, and opens the text side of its model.
    pub(crate) async fn find(args: &Args) -> Result<Remote, Box<dyn std::error::Error>> {
        if args.models.len() > 1 {
            return Err(RemoteError::Models(args.models.len()).into());
        }
        let dials = dials(args)?;
        let (address, offer) = first_offer(&dials).await?;
        let given = args.models.first();
        let named = NamedModel {
            name: given.map_or(&offer.name, |model| &model.name).clone(),
            folder: match given {
                Some(model) => model.folder.clone(),
                None => offer.model.as_ref().map(Into::into),
            },
        };
        let opened = open(&named, &args.host.compile);
        let (frontend, own) = opened.map_err(|source| RemoteError::Model {
            address: address.clone(),
            source: Box::new(source),
        })?;
        let expected = Offer { digest: own, ..offer.clone() };
        suits(&expected, &offer).map_err(|message| RemoteError::Unsuitable { address, message })?;
        Ok(Remote { name: named.name, frontend, offer })
    }

    /// Has the model served by its engines, as far as and as soon as they are there.
    pub(crate) fn serve(
        self,
        app: &App,
        args: &Args,
        spawn: Spawn<'_>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let Remote { name, frontend, offer } = self;
        let facts = &offer.facts;
        let metrics = Arc::new(app.metrics.model(&name, StepInputs::BLOCK_SIZE, facts.blocks));
        let lines = dials(args)?.into_iter().map(|dial| {
            let status = Arc::new(Status::new(facts.sequences, args.limits.queue));
            let outbox: Shared = Arc::new(Mutex::new(Outbox::new(status.clone(), metrics.clone())));
            let name = dial.address.to_string();
            let here = Here {
                expected: offer.clone(),
                status: status.clone(),
                outbox: outbox.clone(),
                metrics: metrics.clone(),
            };
            let (remote, follow) = dial.follow(here);
            spawn(Box::pin(follow));
            Line::remote(name, Arc::new(remote) as Arc<dyn Link>, status, outbox)
        });
        let worker = Worker::new(lines.collect(), args.limits.unread());
        let Some(entry) = app.models.first() else { return Ok(()) };
        entry.set(Served::new(&name, frontend, offer.facts, worker, metrics));
        Ok(())
    }
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

/// What the first engine offers that answers. What only its operator can mend ends it.
async fn first_offer(dials: &[Dial]) -> Result<(Address, Offer), RemoteError> {
    for tried in 0u32.. {
        for dial in dials {
            match dial.offer().await {
                Ok(offer) => return Ok((dial.address.clone(), offer)),
                Err(source @ (LinkError::Open(_) | LinkError::NoSecret | LinkError::Secret)) => {
                    return Err(RemoteError::Link { address: dial.address.clone(), source });
                }
                Err(error) if tried % TOLD == 0 => {
                    tracing::info!(engine = %dial.address, %error, "waiting for an engine");
                }
                Err(_) => {}
            }
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
}

impl FrontEnd for Here {
    fn offered(&mut self, offer: &Offer) -> Result<(), String> {
        suits(&self.expected, offer)?;
        self.status.arrived(offer.instance, &offer.facts);
        Ok(())
    }

    fn reported(&mut self, report: Report) {
        locked(&self.outbox).report(report);
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

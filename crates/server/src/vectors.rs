//! What models give that do not generate: a vector or scores for each prompt.

use std::sync::Arc;
use std::time::{Duration, Instant};

use infernum_ir::Task;
use infernum_runtime::Request;

use super::app::App;
use super::error::ApiError;
use super::generation::MOST_CHOICES;
use super::model::Served;
use super::outbox::Output;
use super::traces::{self, Ended};
use super::worker::{Rooms, Untaken};

/// Prompts of one HTTP request at most, as OpenAI has it.
pub(crate) const MOST_PROMPTS: usize = 2048;
/// How often room is looked for while others take it.
const PAUSE: Duration = Duration::from_millis(10);

/// What came of prompts, in their order.
pub(crate) struct Computed {
    pub(crate) rows: Vec<Box<[f32]>>,
    pub(crate) prompt_tokens: usize,
}

/// Refuses a model that is for something else than is asked of it.
pub(crate) fn check_task(served: &Served, wanted: &[Task], what: &str) -> Result<(), ApiError> {
    let task = served.frontend.task();
    if wanted.contains(&task) {
        return Ok(());
    }
    let does = match task {
        Task::Generate => "generates text",
        Task::Embed => "gives embeddings",
        Task::Score => "gives scores",
    };
    let message = format!(
        "the model `{}` {does}: it has no {what}; expected a model whose checkpoint says that it has",
        served.name
    );
    Err(ApiError::malformed(message).param("model").because("model_not_supported"))
}

/// Refuses no prompts, and more than one request may send.
pub(crate) fn check_prompts(param: &str, found: usize) -> Result<(), ApiError> {
    if (1..=MOST_PROMPTS).contains(&found) {
        return Ok(());
    }
    let message = format!("{param}: expected 1 to {MOST_PROMPTS} texts, found {found}");
    Err(ApiError::value(param, message))
}

/// Has the engine compute prompts, so many at a time that others get their turn, too. Dropping it cancels what has
/// not ended. What it refuses is the fault of the field `param`.
pub(crate) async fn compute(
    app: &App,
    served: &Arc<Served>,
    prompts: Vec<Request>,
    param: &str,
) -> Result<Computed, ApiError> {
    let prompt_tokens = prompts.iter().map(|r| r.tokens.len()).sum();
    let deadline = app.request_timeout.map(|t| Instant::now() + t);
    let (all, arrival) = (all_rows(served, prompts, param), Instant::now());
    let rows = match deadline {
        None => all.await,
        Some(deadline) => {
            let timed = tokio::time::timeout_at(deadline.into(), all).await;
            let late = || ApiError::timeout("the request took longer than this server allows");
            timed.unwrap_or_else(|_| Err(late()))
        }
    };
    if let Some(span) = traces::current() {
        span.end(Ended {
            model: served.name.clone(),
            prompt: prompt_tokens,
            in_all: arrival.elapsed(),
            error: rows.as_ref().err().map(|error| format!("error {}", error.status.as_u16())),
            ..Ended::default()
        });
    }
    Ok(Computed { rows: rows?, prompt_tokens })
}

async fn all_rows(
    served: &Arc<Served>,
    mut prompts: Vec<Request>,
    param: &str,
) -> Result<Vec<Box<[f32]>>, ApiError> {
    let most = served.worker.room().clamp(1, MOST_CHOICES);
    let mut rows = Vec::with_capacity(prompts.len());
    while !prompts.is_empty() {
        let rest = prompts.split_off(prompts.len().min(most));
        let rooms = room(served, &prompts, rows.is_empty()).await?;
        rows.extend(some_rows(served, prompts, rooms, param).await?);
        prompts = rest;
    }
    Ok(rows)
}

/// Room for so many. The first ones are refused where there is none, so that a crowd hears of it; later ones wait.
async fn room(served: &Served, prompts: &[Request], first: bool) -> Result<Rooms, ApiError> {
    loop {
        match served.admit(prompts) {
            Ok(rooms) => return Ok(rooms),
            Err(why) if first || !matches!(why, Untaken::Busy) => return Err(served.untaken(&why)),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

async fn some_rows(
    served: &Arc<Served>,
    prompts: Vec<Request>,
    rooms: Rooms,
    param: &str,
) -> Result<Vec<Box<[f32]>>, ApiError> {
    let mut rows: Vec<Box<[f32]>> = vec![Box::default(); prompts.len()];
    let mut left = prompts.len();
    let mut running = served.submit(prompts, rooms).map_err(|_| ApiError::engine_gone())?;
    while left > 0 {
        let (choice, output) = running.next().await.ok_or_else(ApiError::engine_gone)?;
        match output {
            Output::Vector(row) => rows[choice as usize] = row,
            Output::Finished(_) => {
                running.ended(choice);
                left -= 1;
            }
            Output::Rejected(error) => {
                running.ended(choice);
                return Err(ApiError::from(&error).param(param));
            }
            Output::Failed(message) => {
                running.ended(choice);
                return Err(ApiError::internal(format!("the engine failed: {message}")));
            }
            Output::Unread => {
                running.ended(choice);
                return Err(ApiError::internal("the answer was not taken in time"));
            }
            Output::Accepted | Output::Started(..) | Output::Prompt(_) | Output::Token(..) => {}
        }
    }
    if rows.iter().any(|row| row.is_empty()) {
        return Err(ApiError::internal("the engine gave nothing for a prompt"));
    }
    // JSON would have a null for it, and an order of scores a place.
    if rows.iter().flat_map(|row| row.iter()).any(|x| !x.is_finite()) {
        return Err(ApiError::internal("the model gave what is no number for a prompt"));
    }
    Ok(rows)
}

//! What a plan holds, for people.

use std::fmt;

use infernum_ir::Dims;
use infernum_passes::Bucket;
use serde::Serialize;

use crate::plan::{Launch, Plan, ProgramCall};

impl Plan {
    /// Sizes and counts, for people.
    pub fn summary(&self) -> Summary {
        let calls = || self.schedules.iter().flat_map(|s| &s.calls);
        let programs = self.programs.iter().enumerate().map(|(i, p)| ProgramSummary {
            name: p.name.clone(),
            calls: calls().filter(|c| c.program as usize == i).count(),
            launches: p.launches.len(),
            in_place: p.launches.iter().filter(|l| l.is_in_place()).count(),
            copies: p.launches.iter().filter(|l| l.op == Launch::COPY).count(),
            buffers: p.buffers.len(),
        });
        let launches =
            |c: &ProgramCall| self.programs.get(c.program as usize).map_or(0, |p| p.launches.len());
        let schedules = self.schedules.iter().map(|s| ScheduleSummary {
            bucket: s.bucket,
            launches: s.calls.iter().map(launches).sum(),
        });
        let weight_bytes = self.tensors().into_values().map(|ty| ty.bytes(&Dims::default()));
        Summary {
            programs: programs.collect(),
            schedules: schedules.collect(),
            weights: self.weights.len(),
            weight_bytes: weight_bytes.fold(0, u64::saturating_add),
            arena_bytes: self.arena_bytes,
            kv_bytes_per_token: self.kv_bytes_per_token(),
            limits: self.limits,
        }
    }
}

/// What [`Plan::summary`] reports; prints as a small table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Summary {
    pub programs: Vec<ProgramSummary>,
    pub schedules: Vec<ScheduleSummary>,
    pub weights: usize,
    pub weight_bytes: u64,
    pub arena_bytes: u64,
    pub kv_bytes_per_token: u64,
    pub limits: Dims,
}

/// One program's line of a [`Summary`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct ProgramSummary {
    pub name: String,
    pub calls: usize,
    pub launches: usize,
    pub in_place: usize,
    pub copies: usize,
    pub buffers: usize,
}

/// One schedule's line of a [`Summary`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct ScheduleSummary {
    pub bucket: Bucket,
    pub launches: usize,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        for p in &self.programs {
            writeln!(
                f,
                "{:<12} {:>3} call(s) of {:>3} op(s), {} in place, {} copies, {} buffers",
                p.name, p.calls, p.launches, p.in_place, p.copies, p.buffers
            )?;
        }
        let Dims { t, s, seqs, .. } = self.limits;
        for s in &self.schedules {
            writeln!(f, "a step       {} ops, {}", s.launches, s.bucket)?;
        }
        writeln!(f, "at most      {t} tokens, {seqs} sequences, {s} context rows")?;
        writeln!(f, "weights      {}: {:.1} MiB", self.weights, mib(self.weight_bytes))?;
        writeln!(f, "arena        {:.1} MiB", mib(self.arena_bytes))?;
        write!(f, "KV cache     {} bytes a token", self.kv_bytes_per_token)
    }
}

//! What launches read next: a kernel that has all it needs under way may have the weights of those that follow brought to
//! the L2 cache, so that memory is read while the chain of launches waits for something else.

use infernum_codegen::{Arg, Launch, Run};
use infernum_ir::Dims;

use super::exec::Core;

/// Bytes between two weights that are read as one span: small constants, such as those of norms, lie between.
const GAP: u64 = 1 << 16;

/// Which launch of a plan: a schedule, a call of it, and a launch of that call's program.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchPlace {
    pub(super) schedule: usize,
    pub(super) call: usize,
    pub(super) launch: usize,
}

/// Bytes side by side on the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

impl Span {
    /// This span and the next one, if that begins where this one ends, or little further.
    fn joined(self, next: Span) -> Option<Span> {
        let end = self.address + self.bytes;
        let near = next.address >= end && next.address - end <= GAP;
        near.then(|| Span { bytes: next.address + next.bytes - self.address, ..self })
    }
}

impl Core {
    /// The weights that are read after a launch, in order, as far as they lie side by side, at most `most` bytes. After a
    /// schedule's last launch its first ones come: the next step is often of the same kind. Only launches count that look ahead
    /// themselves: these read all of their weights, which an embedding, say, does not; of several weights the largest counts.
    pub(super) fn ahead(&self, place: LaunchPlace, most: u64) -> Span {
        let calls = &self.plan.schedules[place.schedule].calls;
        let mut found: Option<Span> = None;
        let all = calls.iter().cycle().skip(place.call).take(calls.len() + 1);
        for (n, call) in all.enumerate() {
            let frame = self.frame(call);
            let launches = &self.plan.programs[call.program as usize].launches;
            let first = if n == 0 { place.launch + 1 } else { 0 };
            for launch in launches.iter().skip(first).filter(|l| looks_ahead(l)) {
                let weights = launch.operands.iter().flatten();
                let weights = weights.filter(|v| matches!(v.arg, Arg::Weight(_)));
                let spans = weights.filter_map(|v| {
                    let bytes = v.ty.tensor().ok()?.bytes(&Dims::default());
                    Some(Span { address: frame.address(v).ok()?, bytes })
                });
                let Some(next) = spans.max_by_key(|span| span.bytes) else { continue };
                let joined = found.map_or(Some(next), |span| span.joined(next));
                let Some(span) = joined else { return clipped(found, most) };
                found = Some(span);
                if span.bytes >= most {
                    return clipped(found, most);
                }
            }
        }
        clipped(found, most)
    }
}

/// A span of at most `most` bytes, in whole pieces of 16 as the copy engine wants it; none is empty.
fn clipped(span: Option<Span>, most: u64) -> Span {
    let Span { address, bytes } = span.unwrap_or_default();
    Span { address, bytes: bytes.min(most) / 16 * 16 }
}

fn looks_ahead(launch: &Launch) -> bool {
    matches!(&launch.run, Some(Run::Kernel(kernel)) if kernel.ahead.is_some())
}

#[cfg(test)]
mod tests {
    use super::{GAP, Span};

    #[test]
    fn spans_join_where_little_lies_between() {
        let first = Span { address: 4096, bytes: 1024 };
        let at = |address| first.joined(Span { address, bytes: 64 }).map(|s| s.bytes);
        assert_eq!(at(5120), Some(1088));
        assert_eq!(at(5120 + GAP), Some(1024 + GAP + 64));
        assert_eq!(at(5120 + GAP + 1), None);
        assert_eq!(at(4096), None, "the same weight again is no continuation");
    }
}

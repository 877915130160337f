//! What sequences hold of the cache, as arithmetic has it, while requests come and go; and models whose layers keep
//! their state in different ways.

use super::*;
use crate::engine::held::Held;
use crate::engine::kv::Prefix;

/// All that a sequence holds of a group, each block once for each use.
fn blocks_of(held: &Held) -> Vec<u32> {
    let left = held.left.iter().flat_map(|(_, blocks)| blocks);
    held.blocks[held.gone..].iter().chain(&held.read).chain(left).copied().collect()
}

impl Engine<Fake> {
    /// Fails if a sequence holds more or fewer blocks than it needs for the rows that it may compute next.
    pub(super) fn audit_held(&mut self) {
        // What the next step begins with.
        if self.reserve() {
            for (_, s) in self.sequences.iter().filter(|(_, s)| s.running) {
                for (group, held) in s.held.iter().enumerate() {
                    self.check_held(s, group, blocks_of(held).len());
                }
            }
        }
        self.audit();
    }

    /// Fails if a block is lost or has users that do not know of it.
    pub(super) fn audit(&self) {
        let mut users = Vec::new();
        for (_, s) in &self.sequences {
            let held: Vec<Vec<u32>> = s.held.iter().map(blocks_of).collect();
            assert!(s.running || held.iter().all(Vec::is_empty), "waiting with memory");
            assert!(s.kept * BLOCK <= s.computed && s.computed <= s.submitted);
            users.extend(held);
        }
        let users: Vec<&[u32]> = users.iter().map(Vec::as_slice).collect();
        let prefixes: Vec<Prefix> = self.sequences.iter().map(|(_, s)| s.prefix).collect();
        self.pool.check(&users, &prefixes);
        assert_eq!(self.running.len() + self.waiting.len(), self.sequences.len());
    }

    /// Fails unless the rows of the step under way that follow computed ones and a whole prompt are in front,
    /// and nothing else is; if a row is written to a block that is kept for others; and if a step waits for the host.
    pub(super) fn check_flight(&self, live: &BTreeMap<RequestId, Live>) {
        // No row's wish makes a step wait, nor brings logits.
        let executor = &self.executor;
        let is_ahead = executor.feeds && self.options.ahead && self.flight.is_some();
        assert_eq!(executor.submitted - executor.waited, u64::from(is_ahead));
        assert!(!executor.samples || executor.brought == 0);
        let planned = self.flight.iter().flat_map(|flight| &flight.planned);
        for (i, p) in planned.enumerate() {
            let Some(l) = live.get(&p.id) else { continue };
            let is_single =
                p.context == p.past + 1 && (p.yields || p.deferred || executor.reproducible);
            let follows = p.past >= l.request.tokens.len() && is_single;
            assert_eq!(i < self.inputs.generated(), follows, "{p:?}");
            for (group, kind) in self.executor.groups.iter().enumerate() {
                let written = match kind {
                    GroupKind::Slot { .. } => self.inputs.blocks(i, group),
                    _ => &self.inputs.blocks(i, group)[p.past / BLOCK..],
                };
                assert!(!written.iter().any(|b| self.pool.is_kept(*b)), "{p:?}");
            }
        }
    }

    /// Fails unless a request's rows after the first `rows` are given back.
    pub(super) fn check_truncated(&self, id: RequestId, rows: usize) {
        let Some((_, s)) = self.sequences.iter().find(|(_, s)| s.id == id) else { return };
        let most = self.pool.whole_runs(rows.div_ceil(BLOCK));
        for (kind, held) in self.executor.groups.iter().zip(&s.held) {
            let is_slot = matches!(kind, GroupKind::Slot { .. });
            assert!(is_slot || held.blocks.len() <= most, "not given back");
        }
    }

    /// `found`: blocks that a sequence holds of a group, ready for its next rows.
    fn check_held(&self, s: &Sequence, group: usize, found: usize) {
        let chunk = self.limits.chunk.min(self.limits.step.t as usize);
        let length = s.length();
        let run = if self.options.kv == KvMode::Contiguous { MAX_LENGTH / BLOCK } else { 1 };
        match self.executor.groups[group] {
            GroupKind::Ring { window } if run == 1 => {
                // Rows from the first on that the next one sees, or that is not known to hold yet.
                let again = usize::from(s.cursor.is_some() && s.computed < s.submitted);
                let first =
                    (s.submitted + 1 - again).saturating_sub(window).min(s.computed) / BLOCK;
                let most = (window.max(chunk) + chunk).div_ceil(BLOCK) + 1;
                let expected = (length.div_ceil(BLOCK) - first).min(most);
                assert_eq!(found, expected, "of a ring of {window}");
                let end = length.min(s.submitted + chunk);
                assert!(end <= (first + found) * BLOCK, "no room for the largest step");
            }
            GroupKind::Slot { blocks } => {
                // Its own; and where it came from, until that is read and known to hold.
                let whole = blocks.next_multiple_of(run);
                assert!(found >= whole && (found - whole).is_multiple_of(blocks), "of a slot");
            }
            _ => assert_eq!(found, length.div_ceil(BLOCK).next_multiple_of(run)),
        }
    }
}

const PAGED: GroupKind = GroupKind::Paged;
const SLOT: GroupKind = GroupKind::Slot { blocks: 2 };

const fn ring(window: usize) -> GroupKind {
    GroupKind::Ring { window }
}

/// Models whose layers keep their state in different ways.
fn models() -> Vec<Vec<GroupKind>> {
    vec![
        vec![ring(1)],
        vec![ring(9)],
        vec![SLOT],
        vec![PAGED, ring(6)],
        vec![ring(3), ring(13), PAGED],
        vec![PAGED, SLOT],
        vec![SLOT, ring(5), GroupKind::Slot { blocks: 1 }],
        vec![ring(4), PAGED, SLOT, ring(8), PAGED],
    ]
}

/// More than one million steps in all.
#[test]
fn however_layers_keep_their_state_every_request_ends_with_its_own_text() {
    let (models, options) = (models(), all_options());
    let steps = 1_200_000 / (models.len() * options.len()) as u64;
    let mut totals = Stats::default();
    for (m, groups) in models.iter().enumerate() {
        for (i, options) in options.iter().enumerate() {
            let (stats, _) = stress_groups((m * 1000 + i) as u64, steps, groups, *options);
            totals.steps += stats.steps;
            totals.preemptions += stats.preemptions;
            totals.prefix_hits += stats.prefix_hits;
        }
    }
    // The test would be worth little if these did not happen.
    assert!(totals.preemptions > 1_000, "{totals:?}");
    assert!(totals.prefix_hits > 20_000, "{totals:?}");
    assert!(totals.steps > 1_000_000, "{totals:?}");
}

fn stress_groups(
    seed: u64,
    steps: u64,
    groups: &[GroupKind],
    options: EngineOptions,
) -> (Stats, [u64; 2]) {
    let mut random = Random::new(seed);
    let b = 1 + random.below(6) as u64;
    let t = b.max(1 + random.below(16) as u64);
    let outputs = (b + random.below(8) as u64).min(t);
    let pairs = 40 * b + random.below(200) as u64;
    let step = Dims { t, b: outputs, s: 40 * b, pairs, seqs: b };
    let (chunk, gpu) = (1 + random.below(16), random.below(2) == 0);
    // Room for one or two of the longest: it is full most of the time.
    let run = if options.kv == KvMode::Contiguous { MAX_LENGTH / BLOCK } else { 1 };
    let most = groups.iter().map(|g| g.most_blocks(MAX_LENGTH, BLOCK, chunk).next_multiple_of(run));
    let blocks = most.sum::<usize>().next_multiple_of(run) + random.below(8);
    let mut engine = engine_of(groups, step, chunk, blocks, gpu, options);
    engine.executor.reproducible = seed.is_multiple_of(3);
    stress(seed, steps, engine)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// As above, on few steps, so that a failure is found small.
    #[test]
    fn any_groups_and_options(
        seed in any::<u64>(), which in any::<prop::sample::Index>(),
        groups in prop::collection::vec(
            prop_oneof![
                Just(PAGED),
                (1..20usize).prop_map(ring),
                (1..4usize).prop_map(|blocks| GroupKind::Slot { blocks }),
            ],
            1..5,
        ),
        steps in 1..400u64,
    ) {
        let all = all_options();
        stress_groups(seed, steps, &groups, all[which.index(all.len())]);
    }
}

//! How steps are laid out.

use super::*;
use infernum_ir::picking::Edits;

use crate::sampling::{SamplingParams, SeenToken, Tell, TokenPick};

fn room(blocks: usize, picks: usize) -> Room {
    Room { table: blocks, slots: 0, groups: 1, picks, segments: 0, adapters: 0 }
}

#[test]
fn a_step_is_laid_out_as_kernels_read_it() {
    let limits = Dims { t: 8, b: 2, s: 64, pairs: 512, seqs: 2 };
    let layout = Layout::new(&limits, room(9, 2), (true, false)).at(1 << 20);
    let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
    inputs.push(&[5, 6], 18, &[3, 7]).expect("a sequence");
    inputs.push(&[8], 1, &[0]).expect("a sequence");
    let params = SamplingParams { temperature: 2.0, top_k: 40, ..SamplingParams::default() };
    let seen = [SeenToken { token: 5, generated: 1 }; 3];
    let edits = Edits { bias: &[(9, 1.0)], seen: &seen, allowed: None };
    let tell = Some(Tell { top: 5, given: None });
    inputs.set_pick(&TokenPick { params, position: 1, edits, counts_own: true, tell });
    let mut bytes = vec![7; layout.bytes()];
    let (dims, used) = layout.write(&inputs, 9, Some(Sym::B), 4096, &mut bytes).expect("a step");
    assert_eq!((dims.all.t, dims.all.b, dims.all.s), (3, 2, 19));
    assert!(used <= layout.bytes());
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let wide = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    assert_eq!([word(0), word(4), word(8), word(12)], [3, 2, 19, 2]);
    assert_eq!([wide(16), wide(24)], [4, 2 * 18 + 1]);
    let array = |field: Field, n: usize| -> Vec<u32> {
        let at = (layout.address(field) - (1 << 20)) as usize;
        (0..n).map(|i| word(at + 4 * i)).collect()
    };
    assert_eq!(array(Field::Tokens, 3), [5, 6, 8]);
    assert_eq!(array(Field::Positions, 3), [16, 17, 0]);
    assert_eq!(array(Field::Slots, 3), [7 * 16, 7 * 16 + 1, 0]);
    assert_eq!(array(Field::Seq, 3), [0, 0, 1]);
    assert_eq!(array(Field::First, 3), [0, 2, 3]);
    assert_eq!(array(Field::ContextStart, 3), [0, 18, 19]);
    assert_eq!(array(Field::OutputRows, 2), [1, 2]);
    assert_eq!(array(Field::Blocks, 2), [3, 7]);
    assert_eq!(array(Field::ContextPositions, 19)[17..], [17, 0]);
    assert_eq!(array(Field::PairStart, 6), [0, 0, 18, 0, 36, 0]);
    let picks = array(Field::Picks, 2 * PickRow::WORDS);
    let (first, second) = picks.split_at(PickRow::WORDS);
    assert_eq!(first, [0; PickRow::WORDS], "greedy");
    let set = inputs.step().picks.row(1);
    assert_eq!(PickRow::from_words(second), set);
    assert_eq!((set.scale, set.top_k), (std::f32::consts::LOG2_E / 2.0, 40));
    let PickRow { lists, biased, seen, counts_own, told, given, .. } = set;
    assert_eq!([lists, biased, seen, counts_own, told, given], [0, 1, 3, 1, 6, 0]);
    assert_eq!(inputs.step().picks.words(), [9, 1.0f32.to_bits(), 5, 1, 5, 1, 5, 1]);
    assert_eq!(wide(32 + 8 * Field::Picks as usize), 4096, "the lists");
    let found = wide(32 + 8 * Field::Slots as usize);
    assert_eq!(found, layout.address(Field::Slots));
}

/// Each group's views have slots and tables of their own, and all else alike.
#[test]
fn groups_have_slots_and_tables_of_their_own() {
    use crate::exec::GroupKind;
    let limits = Dims { t: 9, b: 5, s: 64, pairs: 512, seqs: 5 };
    let room = Room { groups: 2, ..room(9, 0) };
    let layout = Layout::new(&limits, room, (false, true)).at(1 << 20);
    let groups = [GroupKind::Paged, GroupKind::Ring { window: 8 }];
    let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE).with_groups(&groups);
    inputs.push(&[1], 18, &[3, 7, 5, 6]).expect("a generated row");
    inputs.push(&[2, 3], 17, &[2, 8, 0, 4]).expect("a prompt");
    let mut bytes = vec![7; layout.bytes()];
    let (_, used) = layout.write(&inputs, 9, None, 0, &mut bytes).expect("a step");
    assert!(used <= layout.bytes());
    let words = |address: u64, n: usize| -> Vec<u32> {
        let at = (address - (1 << 20)) as usize;
        bytemuck::pod_collect_to_vec(&bytes[at..at + 4 * n])
    };
    for (group, [first, second]) in [[[3, 7], [2, 8]], [[5, 6], [0, 4]]].into_iter().enumerate() {
        for (part, tables) in [
            (Part::All, vec![first, second]),
            (Part::Generated, vec![first]),
            (Part::Prompt, vec![second]),
        ] {
            let header = words(layout.view(group, part), HEADER / 4);
            let step: abi::Step = bytemuck::pod_read_unaligned(bytemuck::cast_slice(&header));
            let new: Vec<u32> = match part {
                Part::All => vec![first[1] * 16 + 1, second[0] * 16 + 15, second[1] * 16],
                Part::Generated => vec![first[1] * 16 + 1],
                Part::Prompt => vec![second[0] * 16 + 15, second[1] * 16],
            };
            assert_eq!(words(bytemuck::cast(step.slots), new.len()), new, "{group} {part:?}");
            for (b, table) in tables.iter().enumerate() {
                let at = bytemuck::cast::<_, u64>(step.blocks) + (4 * b * layout.stride) as u64;
                assert_eq!(words(at, 2), table, "{group} {part:?}");
            }
            let rows = words(bytemuck::cast(step.positions), new.len());
            assert_eq!(
                rows,
                if part == Part::Prompt {
                    vec![15, 16]
                } else {
                    vec![17, 15, 16][..new.len()].to_vec()
                }
            );
        }
    }
}

/// Each part's view is what a step of its rows alone would have, wherever the arrays lie; but for what is
/// picked, which no part has.
#[test]
fn a_part_is_seen_as_a_step_of_its_own() {
    let sequences = [(1, 18, [3, 7]), (1, 1, [0, 0]), (4, 20, [5, 6]), (1, 9, [8, 0])];
    let inputs = |which: &[(usize, usize, [u32; 2])]| {
        let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
        for &(new, context, blocks) in which {
            let tokens: Vec<u32> = (0..new).map(|i| (10 * context + i) as u32).collect();
            inputs.push(&tokens, context, &blocks).expect("a sequence");
        }
        inputs
    };
    let limits = Dims { t: 9, b: 5, s: 64, pairs: 512, seqs: 5 };
    let layout = Layout::new(&limits, room(9, 2), (true, true)).at(1 << 20);
    for generated in 0..=sequences.len() {
        // Generated rows are those in front.
        let order: Vec<_> = (0..4).filter(|i| *i != 2).chain([2]).collect();
        let mixed: Vec<_> = order.iter().map(|i| sequences[*i]).collect();
        let mut all = StepInputs::new(StepInputs::BLOCK_SIZE);
        for (i, &(new, context, blocks)) in mixed.iter().enumerate() {
            if i == generated {
                all.begin_prompts();
            }
            let tokens: Vec<u32> = (0..new).map(|i| (10 * context + i) as u32).collect();
            all.push(&tokens, context, &blocks).expect("a sequence");
        }
        let generated = generated.min(3); // the last has four tokens
        let mut bytes = vec![7; layout.bytes()];
        let (dims, used) = layout.write(&all, 9, Some(Sym::B), 0, &mut bytes).expect("a step");
        assert!(used <= layout.bytes());
        for (part, own) in [
            (Part::All, &mixed[..]),
            (Part::Generated, &mixed[..generated]),
            (Part::Prompt, &mixed[generated..]),
        ] {
            let size = |dims: Dims| Dims { b: 0, ..dims };
            assert_eq!(size(dims.of(part)), size(inputs(own).step().dims()));
            let seen = Seen { bytes: &bytes[..used], at: HEADER * part.view() };
            let mut alone = vec![9; layout.bytes()];
            let (_, end) =
                layout.write(&inputs(own), 9, Some(Sym::B), 0, &mut alone).expect("a step");
            let alone = Seen { bytes: &alone[..end], at: 0 };
            assert_eq!(seen.arrays(), alone.arrays(), "{part:?}, {generated} generated");
            let step: abi::Step = bytemuck::pod_read_unaligned(&bytes[seen.at..seen.at + HEADER]);
            let none = Address::default();
            assert_eq!(step.output_rows == none, part != Part::All);
            let before = if part == Part::Prompt { generated } else { 0 };
            assert_eq!((step.all, step.before), (dims.all.t as i32, before as i32), "{part:?}");
        }
    }
}

/// A view, as a kernel sees it.
struct Seen<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Seen<'_> {
    fn words(&self, at: usize, n: usize) -> Vec<u32> {
        let all = self.bytes[at..at + 4 * n].chunks_exact(4);
        all.map(|b| u32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
    }

    /// The step's sizes and all that it points to.
    fn arrays(&self) -> Vec<Vec<u32>> {
        let mut sizes = self.words(self.at, 8);
        sizes[1] = 0; // output is of all rows
        let [t, _, s, b, stride] = [0, 1, 2, 3, 4].map(|i| sizes[i] as usize);
        let array = |field: Field, n: usize| {
            let low = self.words(self.at + 32 + 8 * field as usize, 2)[0] as usize;
            self.words(low - (1 << 20), n)
        };
        let fields = [
            (Field::Tokens, t),
            (Field::Positions, t),
            (Field::ContextPositions, s),
            (Field::Seq, t),
            (Field::Slots, t),
            (Field::First, if t > 0 { b + 1 } else { 0 }),
            (Field::Context, b),
            (Field::ContextStart, if t > 0 { b + 1 } else { 0 }),
            (Field::PairStart, 2 * t),
        ];
        let mut all: Vec<_> = fields.into_iter().map(|(field, n)| array(field, n)).collect();
        let contexts = array(Field::Context, b);
        let blocks = array(Field::Blocks, b * stride);
        for (context, table) in contexts.iter().zip(blocks.chunks_exact(stride)) {
            all.push(table[..(*context as usize).div_ceil(StepInputs::BLOCK_SIZE)].to_vec());
        }
        all.push(sizes);
        all
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let limits = Dims { t: 2, b: 1, s: 32, pairs: 64, seqs: 1 };
    let layout = Layout::new(&limits, room(2, 1), (false, false));
    let mut bytes = vec![0; layout.bytes()];
    let mut inputs = StepInputs::new(StepInputs::BLOCK_SIZE);
    inputs.push(&[1], 20, &[1, 2]).expect("a sequence");
    let outside = layout.write(&inputs, 2, None, 0, &mut bytes);
    assert!(matches!(outside, Err(ExecError::Inputs(_))));
    inputs.push(&[1], 1, &[0]).expect("a sequence");
    let large = layout.write(&inputs, 9, None, 0, &mut bytes);
    assert!(matches!(large, Err(ExecError::TooLarge { .. })));
}

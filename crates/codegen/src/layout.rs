//! One stored copy of every weight, whatever the buckets make of it.
//!
//! One bucket may read a matrix that another reads joined to others, or rows of it. Matrices are
//! row-major and joined along their rows, so the larger one is stored and the other is a range of
//! its rows.

use std::collections::HashMap;

use infernum_ir::{Attr, Dim, Memory, Op, TensorType};

use crate::plan::{Recipe, Weight};

/// Rows of a matrix that is made in no way that keeps rows together.
#[derive(Clone, Debug, PartialEq)]
struct Piece<'a> {
    of: &'a Weight,
    start: u64,
    rows: u64,
}

/// Makes every weight that lies within another one a view of it. Two weights that share rows but
/// are not one within the other (`a, b` and `b, a`) stay two copies: nothing else would serve both.
pub(crate) fn share(weights: &mut [Weight]) {
    for weight in &mut *weights {
        // Parts of a matrix that are joined again are the matrix.
        if let [Piece { of, start: 0, rows }] = pieces(weight)[..]
            && of.ty.shape.first() == Some(&Dim::Const(rows))
            && of.recipe != weight.recipe
        {
            weight.recipe = of.recipe.clone();
        }
    }
    let views = views(weights);
    for (weight, view) in weights.iter_mut().zip(views) {
        if let Some((of, start)) = view {
            weight.recipe = Recipe::Rows { weight: of as u32, start };
        }
    }
}

/// For each weight the one that holds it, which is no view, and its first row there.
fn views(weights: &[Weight]) -> Vec<Option<(usize, u64)>> {
    let pieces: Vec<Vec<Piece<'_>>> = weights.iter().map(pieces).collect();
    let rows = |i: usize| pieces[i].iter().map(|p| p.rows).sum::<u64>();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(rows(i)), i));
    let mut views = vec![None; weights.len()];
    // Where each matrix lies: weight, first row there, and which of its rows.
    let mut stored: HashMap<&Weight, Vec<(usize, u64, &Piece<'_>)>> = HashMap::new();
    for i in order {
        let Some(first) = pieces[i].first() else { continue };
        let holds = |&(of, at, piece): &(usize, u64, &Piece<'_>)| {
            let start = at + first.start.checked_sub(piece.start)?;
            let found = section(&pieces[of], start, rows(i));
            (found == pieces[i]).then_some((of, start))
        };
        views[i] = stored.get(first.of).into_iter().flatten().find_map(holds);
        if views[i].is_none() {
            let mut at = 0;
            for piece in &pieces[i] {
                stored.entry(piece.of).or_default().push((i, at, piece));
                at += piece.rows;
            }
        }
    }
    views
}

/// Bytes of one row of a weight, where each row is a piece of its bytes.
pub fn row_bytes(ty: &TensorType) -> Option<u64> {
    let inner = ty.shape.get(1..)?.iter().map(|d| d.as_const()).collect::<Option<Vec<u64>>>()?;
    match &ty.encoding {
        None => ty.dtype.bytes(inner.iter().product()),
        Some(encoding) if inner.len() == 1 => encoding.row_bytes(inner[0]),
        Some(_) => None,
    }
}

/// What a weight's rows are made of, in order.
fn pieces(weight: &Weight) -> Vec<Piece<'_>> {
    let Some(Dim::Const(rows)) = weight.ty.shape.first().copied() else { return Vec::new() };
    if row_bytes(&weight.ty).is_none() {
        return Vec::new();
    }
    match &weight.recipe {
        Recipe::Concat(parts) => {
            let mut all = Vec::new();
            parts.iter().flat_map(pieces).for_each(|p| append(&mut all, p));
            all
        }
        Recipe::Op { op, attrs, operands, .. }
            if Op::find(op).is_ok_and(|op| op.memory == Memory::Slice) =>
        {
            match (&attrs[..], &operands[..]) {
                ([Attr::Int(0), Attr::Int(start), Attr::Int(_)], [Some(x)]) => {
                    section(&pieces(x), *start as u64, rows)
                }
                _ => vec![Piece { of: weight, start: 0, rows }],
            }
        }
        _ => vec![Piece { of: weight, start: 0, rows }],
    }
}

/// The rows from `start` on, as many as there are up to `rows`.
fn section<'a>(pieces: &[Piece<'a>], start: u64, rows: u64) -> Vec<Piece<'a>> {
    let (mut at, mut found) = (0, Vec::new());
    let end = start.saturating_add(rows);
    for piece in pieces {
        let (from, to) = (start.max(at), end.min(at + piece.rows));
        if from < to {
            let start = piece.start + (from - at);
            append(&mut found, Piece { of: piece.of, start, rows: to - from });
        }
        at += piece.rows;
    }
    found
}

/// Adds a piece, joined to the last one where it goes on from it.
fn append<'a>(pieces: &mut Vec<Piece<'a>>, next: Piece<'a>) {
    match pieces.last_mut() {
        Some(last) if last.of == next.of && last.start + last.rows == next.start => {
            last.rows += next.rows;
        }
        _ => pieces.push(next),
    }
}

#[cfg(test)]
mod tests {
    use infernum_ir::{DType, TensorType};

    use super::*;

    fn tensor(name: &str, rows: u64) -> Weight {
        let ty = TensorType::weight(DType::Bf16, &[rows, 8]);
        Weight { ty, recipe: Recipe::Tensor(name.to_owned()) }
    }

    fn concat(parts: &[&Weight]) -> Weight {
        let rows = parts.iter().map(|p| pieces(p).iter().map(|p| p.rows).sum::<u64>()).sum();
        let ty = TensorType::weight(DType::Bf16, &[rows, 8]);
        Weight { ty, recipe: Recipe::Concat(parts.iter().map(|p| (*p).clone()).collect()) }
    }

    fn slice(x: &Weight, start: i64, rows: u64) -> Weight {
        let ty = TensorType::weight(DType::Bf16, &[rows, 8]);
        let recipe = Recipe::Op {
            op: "slice".to_owned(),
            attrs: vec![Attr::Int(0), Attr::Int(start), Attr::Int(rows as i64)],
            operands: vec![Some(x.clone())],
            types: vec![ty.clone()],
            result: 0,
        };
        Weight { ty, recipe }
    }

    #[test]
    fn parts_are_views_of_what_joins_them() {
        let (q, k, v, o) = (tensor("q", 6), tensor("k", 2), tensor("v", 2), tensor("o", 6));
        let qk = concat(&[&q, &k]);
        // Joined in either order of joining: one stored copy, the first.
        let qkv = [concat(&[&qk, &v]), concat(&[&q, &concat(&[&k, &v])])];
        let all = [q.clone(), qk, qkv[0].clone(), k, v, qkv[1].clone(), o, slice(&q, 2, 3)];
        let expected = [
            Some((2, 0)),
            Some((2, 0)),
            None,
            Some((2, 6)),
            Some((2, 8)),
            Some((2, 0)),
            None,
            Some((2, 2)),
        ];
        assert_eq!(views(&all), expected);
    }

    #[test]
    fn slices_of_a_stored_matrix_are_views_of_it_and_join_again() {
        let packed = tensor("qkv", 10);
        let (q, kv) = (slice(&packed, 0, 6), slice(&packed, 6, 4));
        let again = concat(&[&q, &kv]);
        assert_eq!(
            views(&[q, again, packed, kv]),
            [Some((1, 0)), None, Some((1, 0)), Some((1, 6))]
        );
    }

    #[test]
    fn parts_that_are_joined_again_are_the_matrix() {
        let packed = tensor("qkv", 10);
        let (q, kv) = (slice(&packed, 0, 6), slice(&packed, 6, 4));
        let mut all = [concat(&[&q, &kv]), concat(&[&kv, &q]), q.clone()];
        share(&mut all);
        assert_eq!(all[0].recipe, packed.recipe);
        // In another order it is another matrix.
        assert!(matches!(all[1].recipe, Recipe::Concat(_)));
        assert_eq!(all[2].recipe, Recipe::Rows { weight: 0, start: 0 });
    }

    #[test]
    fn what_is_only_alike_is_not_shared() {
        let (a, b, c) = (tensor("a", 2), tensor("b", 2), tensor("c", 2));
        let other = Weight { ty: TensorType::weight(DType::F32, &[2, 8]), ..a.clone() };
        let all = [concat(&[&a, &b]), concat(&[&b, &a]), concat(&[&b, &c]), other];
        assert_eq!(views(&all), [None; 4]);
    }
}

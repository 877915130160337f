//! Products of codes against sums in f64 over what the packed form's definition says.

use infernum_ir::encoding::packing::packed_value;
use infernum_ir::encoding::{Code, EncodingDef, Group, Stored};
use infernum_ir::{Encoding, random};
use infernum_passes::data::Kernels;

use super::*;

/// Every encoding that has a packed form, and one as none that ships is: bytes in groups of 16.
fn encodings() -> Vec<Encoding> {
    let kernels = Kernels::load(None, &[]).expect("the shipped files");
    let rows = kernels.ops.encoding("fp8_row").expect("it ships").def().clone();
    let small = EncodingDef {
        name: "fp8_16".to_owned(),
        stored: Stored::Tensors {
            of: "weight".to_owned(),
            tensors: vec![
                ("weight".to_owned(), "f8e4m3 [N, K]".to_owned()),
                ("scales".to_owned(), "f32 [N, ceil(K / 16)]".to_owned()),
            ],
            broadcast: Vec::new(),
            unused: Vec::new(),
        },
        group: Group { n: Some(1), k: Some(16) },
        code: Code { kind: CodeKind::E4m3, bits: 8, value: "weight[n][k]".to_owned() },
        scale: "scales[n][k >> 4]".to_owned(),
        activations: None,
        ..rows
    };
    let small = Encoding::new(small).expect("a definition");
    let packed = kernels.ops.encodings().chain([&small]).filter_map(|e| e.packed().ok());
    packed.collect()
}

/// A packed weight, and its values `[rows, columns]`.
fn weight(encoding: &Encoding, rows: usize, columns: usize) -> Option<(Vec<u8>, Vec<f32>)> {
    let stored = encoding.stored()?;
    let (n, k) = (rows as u64, columns as u64);
    let mut rng = random::named(encoding.name(), 7);
    let tensors = stored.random((n, k), Some(Encoding::TAME), &mut rng).ok()?;
    let decoder = stored.decoder(n, k, tensors.iter().map(|(_, b)| &b[..]).collect()).ok()?;
    let packed = decoder.packed().ok()?;
    let value = |(n, k)| packed_value(encoding, columns as u64, &packed, n, k).expect("a value");
    let values = (0..n).flat_map(|n| (0..k).map(move |k| (n, k))).map(value).collect();
    Some((packed, values))
}

/// Sizes that an encoding may have: a part of a unit and a part of a band, or whole blocks.
fn sizes(encoding: &Encoding) -> Option<(usize, usize)> {
    let fits = |(n, k): &(usize, usize)| {
        encoding.stored().is_some_and(|e| e.layout(*n as u64, *k as u64).is_ok())
    };
    [(19, 416), (24, 512), (128, 768)].into_iter().find(fits)
}

#[test]
fn products_are_right() {
    let mut tried = 0;
    for encoding in encodings() {
        let Some((rows, columns)) = sizes(&encoding) else { panic!("{encoding} has no size") };
        let Some((packed, values)) = weight(&encoding, rows, columns) else { continue };
        let w = Codes::new(&encoding, rows, columns, &packed).expect("its bytes");
        let mut row = vec![0.0; columns];
        for (n, values) in values.chunks_exact(columns).enumerate() {
            for isa in Isa::available() {
                w.reader(isa).row(n, &mut row);
                assert_eq!(row, values, "{encoding}, row {n}, {:?}", isa.level());
            }
        }
        for tokens in [1, 3, 70] {
            let x: Vec<f32> =
                random::uniform("x", 1, tokens * columns).into_iter().map(|x| x as f32).collect();
            let mut rounded = x.clone();
            rounded.chunks_exact_mut(columns).for_each(activations::round_row);
            for (rounding, exact) in [(Rounding::None, &x), (Rounding::Eight, &rounded)] {
                for isa in Isa::available() {
                    let mut y = vec![0.5; tokens * rows];
                    let (x, y_mut) = (Act::F32(&x), ActMut::F32(&mut y));
                    linear_codes(isa, x, tokens, &w, None, y_mut, true, rounding);
                    let pairs = exact
                        .chunks_exact(columns)
                        .flat_map(|x| values.chunks_exact(columns).map(move |w| (x, w)));
                    for (i, (y, (x, w))) in y.iter().zip(pairs).enumerate() {
                        let products =
                            || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                        let (sum, size) =
                            (products().sum::<f64>() + 0.5, products().map(f64::abs).sum::<f64>());
                        // Minimums are taken off at the end, so that sums may be larger than the products.
                        let bound = 1e-5 * (size + 1.0);
                        assert!(
                            (f64::from(*y) - sum).abs() <= bound,
                            "{encoding}, {rounding:?}, {:?}, {tokens} tokens, element {i}: expected {sum}, found {y}",
                            isa.level()
                        );
                    }
                }
            }
        }
        tried += 1;
    }
    assert!(tried > 20, "{tried} encodings were tried");
}

#[test]
fn a_token_has_the_same_bits_among_others() {
    for encoding in encodings() {
        let Some((rows, columns)) = sizes(&encoding) else { continue };
        let Some((packed, _)) = weight(&encoding, rows, columns) else { continue };
        let w = Codes::new(&encoding, rows, columns, &packed).expect("its bytes");
        let x: Vec<f32> =
            random::uniform("x", 2, 70 * columns).into_iter().map(|x| x as f32).collect();
        for rounding in [Rounding::None, Rounding::Eight] {
            let product = |from: usize, tokens: usize| {
                let mut y = vec![0.0; tokens * rows];
                let x = Act::F32(&x[from * columns..(from + tokens) * columns]);
                linear_codes(
                    Isa::best(),
                    x,
                    tokens,
                    &w,
                    None,
                    ActMut::F32(&mut y),
                    false,
                    rounding,
                );
                y
            };
            let all = product(0, 70);
            for t in [0, 3, 69] {
                assert_eq!(
                    product(t, 1),
                    all[t * rows..(t + 1) * rows],
                    "{encoding}, {rounding:?}"
                );
            }
        }
    }
}

#[test]
fn what_is_no_number_stays_none_and_the_smallest_numbers_vanish() {
    let encodings = encodings();
    let encoding = encodings.iter().find(|e| e.name() == "q4_0").expect("it ships");
    let (rows, columns) = (8, 64);
    let (packed, _) = weight(encoding, rows, columns).expect("a weight");
    let w = Codes::new(encoding, rows, columns, &packed).expect("its bytes");
    for isa in Isa::available() {
        let product = |x: &[f32]| {
            let mut y = vec![0.0; rows];
            let (x, y_mut) = (Act::F32(x), ActMut::F32(&mut y));
            linear_codes(isa, x, 1, &w, None, y_mut, false, Rounding::Eight);
            y
        };
        for wrong in [f32::NAN, f32::INFINITY] {
            let mut x = vec![1.0; columns];
            x[40] = wrong;
            assert!(product(&x).iter().all(|y| y.is_nan()), "{wrong}, {:?}", isa.level());
        }
        let smallest = f32::from_bits(1);
        assert!(product(&vec![smallest; columns]).iter().all(|y| *y == 0.0), "{:?}", isa.level());
    }
    let mut row = [f32::from_bits(1); 32];
    activations::round_row(&mut row);
    assert_eq!(row, [0.0; 32]);
}

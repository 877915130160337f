//! IR text is read or refused, in bounded memory; what is read can be verified, printed and read
//! back.

#![no_main]

mod common;

use common::{TEXT, bounded};
use infernum_ir::text::{parse, print};
use infernum_ir::{Dims, Graph, Module, NodeKind, OpCall, verify};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let read = bounded("parse, verify and print", text.len(), TEXT, || read(text));
    let Some((module, printed)) = read else { return };
    let back = bounded("parse again", printed.len(), TEXT, || parse(&printed, "printed"));
    match back {
        Ok(back) => assert!(back == module, "changed by printing:\n{printed}"),
        Err(e) => panic!("{e}\n{printed}"),
    }
});

fn read(text: &str) -> Option<(Module, String)> {
    let module = match parse(text, "fuzz") {
        Ok(module) => module,
        Err(e) => {
            std::hint::black_box(e.to_string());
            return None;
        }
    };
    match verify(&module) {
        Ok(()) => module.graphs.iter().for_each(work),
        Err(e) => {
            std::hint::black_box(e.to_string());
        }
    }
    let printed = print(&module);
    Some((module, printed))
}

/// Costs of a well-typed graph saturate, whatever its sizes.
fn work(graph: &Graph) {
    let most = Dims { t: u64::MAX, b: u64::MAX, s: u64::MAX, pairs: u64::MAX, seqs: u64::MAX };
    for (index, node) in graph.nodes() {
        if let NodeKind::Op { op, attrs } = &node.kind {
            let operands = graph.operands(index);
            let types: Vec<_> = operands.iter().map(|v| v.map(|v| graph.ty(v))).collect();
            let call = OpCall { op: *op, operands: &types, attrs };
            for dims in [Dims::default(), most] {
                std::hint::black_box((op.work)(&call, &node.types, &dims));
            }
        }
    }
}

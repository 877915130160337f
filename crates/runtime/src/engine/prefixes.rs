//! What beginnings of texts the cache knows, and which blocks hold what of them.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

/// A text's first full blocks. All that is computed of its last block depends on all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Prefix {
    /// No block. Texts of one salt and one adapter, 0 for none, share what follows.
    Root(u64, u64),
    /// The block of this node, after what that depends on.
    Node(u32),
}

/// In place of a block where there is none.
const NONE: u32 = u32::MAX;

/// A tree of blocks of tokens. A node is there as long as something holds on to it: a block that is kept under it, a
/// longer prefix, or a sequence that has come so far. Tokens are compared, so that two prefixes are never
/// taken for one another; and a prefix is found though some groups of layers have given its first blocks back.
#[derive(Clone, Debug)]
pub(super) struct Prefixes {
    /// Tokens in a block.
    block_size: usize,
    /// Where in a node's blocks those of each group begin, and at last their number.
    starts: Vec<usize>,
    nodes: Vec<Node>,
    /// Of each node.
    tokens: Vec<u32>,
    blocks: Vec<u32>,
    found: HashTable<u32>,
    unused: Vec<u32>,
    hasher: RandomState,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    after: Prefix,
    hash: u64,
    /// What holds on to it; 0 if the place is unused.
    holds: u32,
}

impl Prefixes {
    /// `widths`: how many blocks each group keeps under a node.
    pub(super) fn new(block_size: usize, widths: &[usize]) -> Prefixes {
        let mut starts = vec![0];
        starts.extend(widths.iter().scan(0, |end, width| {
            *end += width;
            Some(*end)
        }));
        Prefixes {
            block_size,
            starts,
            nodes: Vec::new(),
            tokens: Vec::new(),
            blocks: Vec::new(),
            found: HashTable::new(),
            unused: Vec::new(),
            hasher: RandomState::new(),
        }
    }

    /// Nodes that are there.
    pub(super) fn len(&self) -> usize {
        self.found.len()
    }

    /// The node of `tokens` after `after`, if it is there.
    pub(super) fn find(&self, after: Prefix, tokens: &[u32]) -> Option<u32> {
        let same = |node: &u32| {
            let at = *node as usize * self.block_size;
            self.nodes[*node as usize].after == after
                && self.tokens[at..at + self.block_size] == *tokens
        };
        self.found.find(self.hasher.hash_one((after, tokens)), same).copied()
    }

    /// The node of `tokens` after `after`, held on to once more.
    pub(super) fn enter(&mut self, after: Prefix, tokens: &[u32]) -> u32 {
        if let Some(node) = self.find(after, tokens) {
            self.hold(Prefix::Node(node));
            return node;
        }
        let hash = self.hasher.hash_one((after, tokens));
        let node = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(Node { after, hash, holds: 0 });
            self.tokens.resize(self.nodes.len() * self.block_size, 0);
            self.blocks.resize(self.nodes.len() * self.width(), NONE);
            self.nodes.len() as u32 - 1
        });
        self.nodes[node as usize] = Node { after, hash, holds: 1 };
        let at = node as usize * self.block_size;
        self.tokens[at..at + self.block_size].copy_from_slice(tokens);
        self.hold(after);
        let nodes = &self.nodes;
        self.found.insert_unique(hash, node, |n| nodes[*n as usize].hash);
        node
    }

    /// The prefix that is a block shorter; the root is its own.
    pub(super) fn shorter(&self, prefix: Prefix) -> Prefix {
        match prefix {
            Prefix::Root(..) => prefix,
            Prefix::Node(node) => self.nodes[node as usize].after,
        }
    }

    /// Holds on to a prefix once more.
    pub(super) fn hold(&mut self, prefix: Prefix) {
        if let Prefix::Node(node) = prefix {
            self.nodes[node as usize].holds += 1;
        }
    }

    /// Lets go of a prefix; what nothing holds on to any more is forgotten.
    pub(super) fn leave(&mut self, mut prefix: Prefix) {
        while let Prefix::Node(at) = prefix {
            let node = &mut self.nodes[at as usize];
            assert!(node.holds > 0, "node {at} was left twice");
            node.holds = node.holds.saturating_sub(1);
            if node.holds > 0 {
                return;
            }
            if let Ok(entry) = self.found.find_entry(node.hash, |n| *n == at) {
                entry.remove();
            }
            self.unused.push(at);
            prefix = node.after;
        }
    }

    /// The blocks that a group keeps under a node.
    pub(super) fn blocks(&self, node: u32, group: usize) -> Option<&[u32]> {
        let blocks = &self.blocks[self.place(node, group)];
        (blocks.first() != Some(&NONE)).then_some(blocks)
    }

    /// Keeps a group's blocks under a node that has none of it.
    pub(super) fn set(&mut self, node: u32, group: usize, blocks: &[u32]) {
        let place = self.place(node, group);
        self.blocks[place].copy_from_slice(blocks);
        self.hold(Prefix::Node(node));
    }

    /// Forgets them.
    pub(super) fn unset(&mut self, node: u32, group: usize) {
        let place = self.place(node, group);
        self.blocks[place].fill(NONE);
        self.leave(Prefix::Node(node));
    }

    fn width(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    fn place(&self, node: u32, group: usize) -> std::ops::Range<usize> {
        let at = node as usize * self.width();
        at + self.starts[group]..at + self.starts[group + 1]
    }
}

#[cfg(test)]
impl Prefixes {
    /// Fails unless each node is held on to by so many longer ones, kept blocks and `users`, the prefixes of
    /// sequences, as it says. All kept blocks, with node and group.
    pub(super) fn check(&self, users: &[Prefix]) -> Vec<(u32, u32, usize)> {
        let mut holds = vec![0u32; self.nodes.len()];
        let mut hold = |prefix: Prefix| {
            if let Prefix::Node(node) = prefix {
                holds[node as usize] += 1;
            }
        };
        let mut kept = Vec::new();
        for node in self.found.iter().copied() {
            hold(self.nodes[node as usize].after);
            for group in 0..self.starts.len() - 1 {
                if let Some(blocks) = self.blocks(node, group) {
                    hold(Prefix::Node(node));
                    kept.extend(blocks.iter().map(|b| (*b, node, group)));
                }
            }
        }
        users.iter().copied().for_each(hold);
        for (node, (holds, found)) in holds.iter().zip(&self.nodes).enumerate() {
            assert_eq!(*holds, found.holds, "holds on node {node}");
        }
        assert_eq!(self.found.len() + self.unused.len(), self.nodes.len());
        kept
    }
}

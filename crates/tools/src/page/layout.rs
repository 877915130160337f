//! Places the nodes of a graph in layers, top down, so that edges cross little.

/// Space between nodes of a layer, and between layers.
const GAP: (f64, f64) = (22.0, 30.0);
/// Room that an edge takes where it passes a layer.
const LANE: f64 = 10.0;
/// Times that layers are reordered, and that they are straightened.
const SWEEPS: usize = 12;

/// Where everything is. Lengths are in the unit of the sizes given.
pub(super) struct Layout {
    pub(super) size: (f64, f64),
    /// The upper left corner of each node.
    pub(super) nodes: Vec<(f64, f64)>,
    /// The points of each edge, from the lower side of a node to the upper side of another.
    pub(super) edges: Vec<Vec<(f64, f64)>>,
}

/// A node, or a place where an edge passes a layer.
struct Item {
    layer: usize,
    size: (f64, f64),
    /// The middle.
    x: f64,
    above: Vec<usize>,
    below: Vec<usize>,
}

/// Lays out nodes of these sizes. Edges lead from a node to one with a greater index.
pub(super) fn layout(sizes: &[(f64, f64)], edges: &[(usize, usize)]) -> Layout {
    let (mut items, routes) = items(sizes, edges);
    let mut layers = vec![Vec::new(); items.iter().map(|i| i.layer + 1).max().unwrap_or(0)];
    items.iter().enumerate().for_each(|(i, item)| layers[item.layer].push(i));
    for sweep in 0..SWEEPS {
        order(&items, &mut layers, sweep % 2 == 0);
    }
    place(&mut items, &layers);
    let tops = tops(&items, &layers);
    let left = |i: usize| items[i].x - items[i].size.0 / 2.0;
    let right = |i: usize| items[i].x + items[i].size.0 / 2.0;
    let start = (0..items.len()).map(left).fold(f64::INFINITY, f64::min).min(1e9);
    let width = (0..items.len()).map(right).fold(f64::NEG_INFINITY, f64::max) - start;
    let height = |layer: usize| layers[layer].iter().map(|&i| items[i].size.1).fold(0.0, f64::max);
    let bottom = layers.len().checked_sub(1).map_or(0.0, |last| tops[last] + height(last));
    let points = |route: &Vec<usize>| {
        let (first, last) = (route[0], route[route.len() - 1]);
        let x = |i: usize| items[i].x - start;
        let y = tops[items[first].layer] + items[first].size.1;
        let mut points = vec![(x(first), y)];
        for &i in &route[1..route.len() - 1] {
            let top = tops[items[i].layer];
            points.extend([(x(i), top), (x(i), top + height(items[i].layer))]);
        }
        points.push((x(last), tops[items[last].layer]));
        points
    };
    Layout {
        size: (width.max(0.0), bottom),
        nodes: (0..sizes.len()).map(|i| (left(i) - start, tops[items[i].layer])).collect(),
        edges: routes.iter().map(points).collect(),
    }
}

/// The nodes, then the passages of edges that skip layers; and what each edge runs through.
fn items(sizes: &[(f64, f64)], edges: &[(usize, usize)]) -> (Vec<Item>, Vec<Vec<usize>>) {
    let mut layer = vec![0usize; sizes.len()];
    for node in 0..sizes.len() {
        let above = edges.iter().filter(|e| e.1 == node).map(|e| layer[e.0] + 1);
        layer[node] = above.max().unwrap_or(0);
    }
    // What nothing feeds stands just above its first user.
    for node in (0..sizes.len()).rev().filter(|n| edges.iter().all(|e| e.1 != *n)) {
        let users = edges.iter().filter(|e| e.0 == node).map(|e| layer[e.1]);
        layer[node] = users.min().map_or(0, |l| l.saturating_sub(1));
    }
    let item = |layer, size| Item { layer, size, x: 0.0, above: Vec::new(), below: Vec::new() };
    let mut items: Vec<Item> = layer.iter().zip(sizes).map(|(l, s)| item(*l, *s)).collect();
    let mut routes = Vec::with_capacity(edges.len());
    for &(from, to) in edges {
        let mut route = vec![from];
        for between in items[from].layer + 1..items[to].layer {
            route.push(items.len());
            items.push(item(between, (LANE, 0.0)));
        }
        route.push(to);
        for pair in route.windows(2) {
            items[pair[0]].below.push(pair[1]);
            items[pair[1]].above.push(pair[0]);
        }
        routes.push(route);
    }
    (items, routes)
}

/// Sorts each layer by the mean place of its neighbours in the layer before (or after).
fn order(items: &[Item], layers: &mut [Vec<usize>], down: bool) {
    let mut place = vec![0.0; items.len()];
    for layer in layers.iter() {
        layer.iter().enumerate().for_each(|(at, &i)| place[i] = at as f64);
    }
    let count = layers.len();
    for step in 0..count {
        let layer = &mut layers[if down { step } else { count - 1 - step }];
        let key = |i: usize| {
            let near = if down { &items[i].above } else { &items[i].below };
            let sum: f64 = near.iter().map(|&n| place[n]).sum();
            if near.is_empty() { place[i] } else { sum / near.len() as f64 }
        };
        let mut keyed: Vec<(f64, usize)> = layer.iter().map(|&i| (key(i), i)).collect();
        keyed.sort_by(|a, b| a.0.total_cmp(&b.0)); // stable
        *layer = keyed.into_iter().map(|(_, i)| i).collect();
        layer.iter().enumerate().for_each(|(at, &i)| place[i] = at as f64);
    }
}

/// Gives every item its middle: near those of its neighbours, but clear of its layer's others.
fn place(items: &mut [Item], layers: &[Vec<usize>]) {
    for layer in layers {
        pack(items, layer, &vec![0.0; layer.len()]);
    }
    for sweep in 0..2 * SWEEPS {
        for step in 0..layers.len() {
            let down = sweep % 2 == 0;
            let layer = &layers[if down { step } else { layers.len() - 1 - step }];
            let wish = |&i: &usize| {
                let near = if down { &items[i].above } else { &items[i].below };
                let sum: f64 = near.iter().map(|&n| items[n].x).sum();
                if near.is_empty() { items[i].x } else { sum / near.len() as f64 }
            };
            let wishes: Vec<f64> = layer.iter().map(wish).collect();
            pack(items, layer, &wishes);
        }
    }
}

/// Puts a layer's items as near to their wishes as their widths let them: half way between packing
/// them from the left and from the right.
fn pack(items: &mut [Item], layer: &[usize], wishes: &[f64]) {
    let apart = |a: usize, b: usize| {
        let lanes = items[a].size.1 == 0.0 && items[b].size.1 == 0.0;
        f64::midpoint(items[a].size.0, items[b].size.0) + if lanes { 0.0 } else { GAP.0 }
    };
    let (mut left, mut right) = (wishes.to_vec(), wishes.to_vec());
    for k in 1..layer.len() {
        left[k] = left[k].max(left[k - 1] + apart(layer[k - 1], layer[k]));
    }
    for k in (1..layer.len()).rev() {
        right[k - 1] = right[k - 1].min(right[k] - apart(layer[k - 1], layer[k]));
    }
    for (k, &i) in layer.iter().enumerate() {
        items[i].x = f64::midpoint(left[k], right[k]);
    }
}

fn tops(items: &[Item], layers: &[Vec<usize>]) -> Vec<f64> {
    let mut top = 0.0;
    let mut next = |layer: &Vec<usize>| {
        let here = top;
        top += layer.iter().map(|&i| items[i].size.1).fold(0.0, f64::max) + GAP.1;
        here
    };
    layers.iter().map(&mut next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_do_not_touch_and_edges_lead_down() {
        let edges =
            [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 5), (4, 6), (5, 6), (0, 6), (7, 5)];
        let sizes: Vec<(f64, f64)> = (0..8).map(|i| (60.0 + 10.0 * f64::from(i), 40.0)).collect();
        let edges = edges.map(|(a, b)| if a == 7 { (4, 5) } else { (a, b) });
        let out = layout(&sizes, &edges);
        for (a, &(ax, ay)) in out.nodes.iter().enumerate() {
            assert!(ax >= 0.0 && ax + sizes[a].0 <= out.size.0 + 1e-9 && ay + 40.0 <= out.size.1);
            for (b, &(bx, by)) in out.nodes.iter().enumerate().skip(a + 1) {
                let beside = ax + sizes[a].0 <= bx || bx + sizes[b].0 <= ax;
                assert!(beside || ay + 40.0 <= by || by + 40.0 <= ay, "{a} and {b} touch");
            }
        }
        for ((from, to), points) in edges.iter().zip(&out.edges) {
            assert!(points.windows(2).all(|p| p[0].1 <= p[1].1), "{from} to {to}: {points:?}");
            assert_eq!(points[0].1, out.nodes[*from].1 + 40.0);
            assert_eq!(points.last().map(|p| p.1), Some(out.nodes[*to].1));
        }
    }

    #[test]
    fn nothing_is_laid_out_as_nothing() {
        assert_eq!(layout(&[], &[]).size, (0.0, 0.0));
    }
}

//! Orders of summation: what makes a row's numbers the same whatever other rows a step has.
//!
//! Variants of a template that declare the same order give a row the same bits. A reproducible plan runs a launch in
//! one order in steps of every kind. Where generated rows and prompt rows may be launched apart, each of the two has
//! an order of its own: such rows never stand for one another.

use super::attach::Attach;
use super::{CudaError, Template, Variant};
use crate::Bucket;
use crate::plan::Launch;

impl Attach<'_> {
    /// The order that a launch must sum in; `None` if any will do.
    pub(super) fn order<'t>(
        &self,
        launch: &Launch,
        bucket: Bucket,
        template: &'t Template,
        shown: &str,
    ) -> Result<Option<&'t str>, CudaError> {
        let Some(kinds) = &self.one_order else { return Ok(None) };
        let apart = template.parts && launch.has_parts();
        let kinds = kinds.iter().copied().filter(|kind| !apart || kind.decode == bucket.decode);
        let kinds: Vec<Bucket> = kinds.chain([bucket]).collect();
        let orders = template.variants.iter().filter_map(|v| v.order.as_deref());
        let mut refused: Vec<&str> = Vec::new();
        for order in orders {
            if refused.contains(&order) {
                continue;
            }
            if self.has_order(launch, &kinds, template, (order, shown))? {
                return Ok(Some(order));
            }
            refused.push(order);
        }
        Err(CudaError::NoOrder { launch: shown.to_owned(), path: template.path.clone() })
    }

    /// Whether steps of every kind have a variant of an order.
    fn has_order(
        &self,
        launch: &Launch,
        kinds: &[Bucket],
        template: &Template,
        (order, shown): (&str, &str),
    ) -> Result<bool, CudaError> {
        let declare = |v: &&Variant| v.order.as_deref() == Some(order);
        let variants: Vec<&Variant> = template.variants.iter().filter(declare).collect();
        for kind in kinds {
            let mut is_there = false;
            for variant in &variants {
                is_there = self.refusal(launch, *kind, template, variant, shown)?.is_none();
                if is_there {
                    break;
                }
            }
            if !is_there {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

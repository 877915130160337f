//! Other names that a model's weights go by: adapters name the modules that they change as the model was called that they
//! were trained with.

use std::collections::BTreeMap;

use infernum_ir::{Graph, Module, Param};

use crate::lower::{LowerError, bases, over_bases, replaced};
use crate::model::{Model, ModelError};

/// What checkpoints of a family call parts of names, in place of what its spec calls them: `also_named`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherNames {
    pairs: Vec<(String, String)>,
}

impl OtherNames {
    /// A name itself, then what it may be in the spec: `model.language_model.layers.0` is `model.layers.0` where
    /// `("model.", "model.language_model.")` is among the pairs, and `layers.0` is where `("model.", "")` is.
    pub fn of(&self, name: &str) -> Vec<String> {
        let meant = self.pairs.iter().filter_map(|(from, to)| match &to[..] {
            "" => Some(format!("{from}{name}")),
            to => replaced(name, to, from),
        });
        std::iter::once(name.to_owned()).chain(meant).collect()
    }
}

impl Model {
    /// What its weights' names may be elsewhere.
    pub fn other_names(&self) -> Result<OtherNames, LowerError> {
        let bases = bases(&self.spec, self.library())?;
        let family = over_bases(&self.spec, &bases)?;
        let owned = |(from, to): &(&str, &str)| ((*from).to_owned(), (*to).to_owned());
        Ok(OtherNames { pairs: family.also_named.iter().map(owned).collect() })
    }

    /// What weights of a GGUF file are called in Hugging Face's format, by their names in the module, `{layer}` in both.
    /// Nothing where the model is of that format.
    pub fn published_names(&self) -> Result<BTreeMap<String, String>, ModelError> {
        if self.container().is_empty() {
            return Ok(BTreeMap::new());
        }
        // Neither looks at a weight, and both are the family's spec: the same weights in the same order.
        let published = weights(&self.lower_in(&[], false, 1)?);
        let own = weights(&self.lower_in(self.container(), true, 1)?);
        if own.len() != published.len() {
            let (place, spec) = (self.files.name().to_owned(), self.spec.file.to_string());
            let (expected, found) = (published.len(), own.len());
            return Err(ModelError::Names { place, spec, expected, found });
        }
        Ok(own.into_iter().zip(published).collect())
    }
}

fn weights(module: &Module) -> Vec<String> {
    let params = module.graphs.iter().flat_map(Graph::params);
    let names = params.filter_map(|(_, param, _)| match param {
        Param::Weight(weight) => Some(weight.name.clone()),
        _ => None,
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::OtherNames;

    fn pairs(pairs: &[(&str, &str)]) -> OtherNames {
        let owned = |(from, to): &(&str, &str)| ((*from).to_owned(), (*to).to_owned());
        OtherNames { pairs: pairs.iter().map(owned).collect() }
    }

    #[test]
    fn names_of_other_checkpoints_are_those_of_the_spec() {
        let inside = pairs(&[("model.", "language_model.model."), ("lm_head", "embed_out")]);
        let own = "model.layers.0.q_proj";
        assert_eq!(inside.of("language_model.model.layers.0.q_proj")[1..], [own]);
        assert_eq!(inside.of("embed_out")[1..], ["lm_head"]);
        assert_eq!(inside.of("vision_tower.layers.0.q_proj").len(), 1);
        assert_eq!(pairs(&[("model.", "")]).of("layers.0.q_proj")[1..], [own]);
    }
}

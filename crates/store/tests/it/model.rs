use crate::support::*;
pub async fn any_sequence_of_verbs_keeps_to_the_model(_world: &World) {}

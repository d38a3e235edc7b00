"""Scenes of occluding objects: data, likelihoods, searches."""

from pyro_truncated.scenes.occlusion import (
    DepthOrder,
    Match,
    Objects,
    OccludedScene,
    Positions,
    Scenes,
    coil_objects,
    generated_objects,
    match_objects,
    occluded_scenes,
)
from pyro_truncated.scenes.place_scan import (
    Candidates,
    PlaceAffinity,
    PlaceRegression,
    PlaceScan,
    RefinedPlaces,
    best_places,
    colour_maps,
    place_probabilities,
)
from pyro_truncated.scenes.place_searches import PlacementCompletion, PlacementMoves, PlacementSelection

__all__ = [
    "Candidates",
    "DepthOrder",
    "Match",
    "Objects",
    "OccludedScene",
    "PlaceAffinity",
    "PlaceRegression",
    "PlaceScan",
    "PlacementCompletion",
    "PlacementMoves",
    "PlacementSelection",
    "Positions",
    "RefinedPlaces",
    "Scenes",
    "best_places",
    "coil_objects",
    "colour_maps",
    "generated_objects",
    "match_objects",
    "occluded_scenes",
    "place_probabilities",
]

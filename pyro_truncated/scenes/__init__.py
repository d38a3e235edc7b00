"""Scenes of objects that hide each other: data, likelihoods, and searches over what stands where."""

from pyro_truncated.scenes.data import Match, Objects, Scenes, coil_objects, generated_objects, match_objects, occluded_scenes
from pyro_truncated.scenes.occlusion import DepthOrder, OccludedScene, Positions
from pyro_truncated.scenes.place_affinities import PlaceRegression, PlaceScan, RefinedPlaces, colour_maps
from pyro_truncated.scenes.placement import Candidates, PlaceAffinity, PlacementMoves, PlacementSelection, place_probabilities

__all__ = [
    "Candidates",
    "DepthOrder",
    "Match",
    "Objects",
    "OccludedScene",
    "PlaceAffinity",
    "PlaceRegression",
    "PlaceScan",
    "PlacementMoves",
    "PlacementSelection",
    "Positions",
    "RefinedPlaces",
    "Scenes",
    "coil_objects",
    "colour_maps",
    "generated_objects",
    "match_objects",
    "occluded_scenes",
    "place_probabilities",
]
